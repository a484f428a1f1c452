// SPDX-License-Identifier: Apache-2.0
// The file "state" of a snapshot: named sections, each with its checksum, bound to one id. See
// docs/snapshot-format.md. Pure; any thread.
//
// A snapshot may come from a stranger: image_parse() checks every length and offset, and whoever
// reads a section looks at its content with the same distrust. The checksums find what was torn or
// decayed; they do not say who wrote it.
#ifndef MAYFLY_SNAPSHOT_IMAGE_H
#define MAYFLY_SNAPSHOT_IMAGE_H

#include "vmm/base/buf.h"
#include "vmm/base/err.h"

#define IMAGE_FORMAT         1U
#define IMAGE_SECTIONS_MAX   64U
#define IMAGE_NAME_MAX       23U
#define IMAGE_FILE_BYTES_MAX (128 * MIB)
#define SNAPSHOT_ID_TEXT_LEN 32

struct snapshot_id {
	uint8_t bytes[16]; // random; all zero stands for none
};

bool snapshot_id_none(const struct snapshot_id *id);
bool snapshot_id_equal(const struct snapshot_id *a, const struct snapshot_id *b);

// 32 hexadecimal digits in lower case. -EINVAL for anything else.
int snapshot_id_parse(const char *text, struct snapshot_id *ret_id);
void snapshot_id_text(const struct snapshot_id *id, char ret_text[SNAPSHOT_ID_TEXT_LEN + 1]);

struct image_section {
	const char *name; // at most IMAGE_NAME_MAX bytes of printable ASCII
	const void *data;
	uint64_t len;
};

// Appends the whole file to out. The names are different, which is asserted. -ENOMEM, -EFBIG.
int image_write(struct buf *out, const struct snapshot_id *id, const struct snapshot_id *parent,
	const struct image_section *sections, unsigned int nr, struct err *err);

struct image {
	struct snapshot_id id, parent; // parent: none if this one stands alone
	unsigned int nr;
	struct {
		char name[IMAGE_NAME_MAX + 1];
		const uint8_t *data; // into what was parsed
		uint64_t len;
	} sections[IMAGE_SECTIONS_MAX];
};

// Looks through len bytes, which outlive ret. -EBADMSG for what is damaged or no snapshot, -ENOTSUP
// for another version's format.
int image_parse(struct image *ret_image, const void *data, size_t len, struct err *err);

// -ENOENT if there is none of that name.
int image_section(const struct image *image, const char *name, const void **ret_data,
	size_t *ret_len, struct err *err);

// The checksum that all of a snapshot uses: XXH3, 64 bits.
uint64_t image_checksum(const void *data, size_t len);

#endif
