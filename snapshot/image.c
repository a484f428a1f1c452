// SPDX-License-Identifier: Apache-2.0
// Sections with checksums; see the header. Any thread.
#include "snapshot/image.h"

#include <errno.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "vmm/base/bytes.h"

static const uint8_t magic[8] = {'m', 'a', 'y', 'f', 'l', 'y', 'S', 'S'};

struct header {
	uint8_t magic[8];
	le32_t format;
	le32_t nr_sections;
	uint8_t id[16];
	uint8_t parent[16];
	le64_t total_bytes; // of the file
	le64_t checksum; // of the header, with this field zero, and of the table
};

struct entry {
	char name[IMAGE_NAME_MAX + 1]; // padded with NULs
	le64_t off; // from the start of the file
	le64_t len;
	le64_t checksum;
};

_Static_assert(sizeof(struct header) == 64, "as documented");
_Static_assert(sizeof(struct entry) == 48, "as documented");

uint64_t image_checksum(const void *data, size_t len)
{
	return XXH3_64bits(data, len);
}

bool snapshot_id_none(const struct snapshot_id *id)
{
	static const struct snapshot_id none;

	return snapshot_id_equal(id, &none);
}

bool snapshot_id_equal(const struct snapshot_id *a, const struct snapshot_id *b)
{
	return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

int snapshot_id_parse(const char *text, struct snapshot_id *ret_id)
{
	static const char digits[] = "0123456789abcdef";
	struct snapshot_id id = {0};

	if (strlen(text) != SNAPSHOT_ID_TEXT_LEN)
		return -EINVAL;
	for (size_t i = 0; i < SNAPSHOT_ID_TEXT_LEN; i++) {
		const char *digit = strchr(digits, text[i]);

		if (!digit)
			return -EINVAL;
		id.bytes[i / 2] = (uint8_t)(id.bytes[i / 2] << 4 | (digit - digits));
	}
	*ret_id = id;
	return 0;
}

void snapshot_id_text(const struct snapshot_id *id, char ret_text[SNAPSHOT_ID_TEXT_LEN + 1])
{
	static const char digits[] = "0123456789abcdef";

	for (size_t i = 0; i < sizeof(id->bytes); i++) {
		ret_text[2 * i] = digits[id->bytes[i] >> 4];
		ret_text[2 * i + 1] = digits[id->bytes[i] & 15];
	}
	ret_text[SNAPSHOT_ID_TEXT_LEN] = '\0';
}

static uint64_t table_checksum(const struct header *header, const struct entry *table)
{
	struct {
		struct header header;
		struct entry table[IMAGE_SECTIONS_MAX];
	} copy = {.header = *header};
	size_t nr = le32_get(header->nr_sections);

	copy.header.checksum = le64_of(0);
	memcpy(copy.table, table, nr * sizeof(*table));
	return image_checksum(&copy, sizeof(*header) + nr * sizeof(*table));
}

int image_write(struct buf *out, const struct snapshot_id *id, const struct snapshot_id *parent,
	const struct image_section *sections, unsigned int nr, struct err *err)
{
	struct entry table[IMAGE_SECTIONS_MAX] = {0};
	struct header header = {
		.format = le32_of(IMAGE_FORMAT),
		.nr_sections = le32_of(nr),
	};
	uint64_t off = sizeof(header) + nr * sizeof(table[0]);

	ASSERT(nr <= IMAGE_SECTIONS_MAX);
	memcpy(header.magic, magic, sizeof(magic));
	memcpy(header.id, id->bytes, sizeof(header.id));
	memcpy(header.parent, parent->bytes, sizeof(header.parent));
	for (unsigned int i = 0; i < nr; i++) {
		const struct image_section *section = &sections[i];

		ASSERT(strlen(section->name) <= IMAGE_NAME_MAX);
		for (unsigned int j = 0; j < i; j++)
			ASSERT(strcmp(sections[j].name, section->name) != 0);
		if (section->len > IMAGE_FILE_BYTES_MAX - off)
			return err_set(err, -EFBIG, "snapshot: the section '%s' is too large",
				section->name);
		memcpy(table[i].name, section->name, strlen(section->name));
		table[i].off = le64_of(off);
		table[i].len = le64_of(section->len);
		table[i].checksum = le64_of(image_checksum(section->data, section->len));
		off += section->len;
	}
	header.total_bytes = le64_of(off);
	header.checksum = le64_of(table_checksum(&header, table));
	buf_append(out, &header, sizeof(header));
	buf_append(out, table, nr * sizeof(table[0]));
	for (unsigned int i = 0; i < nr; i++)
		buf_append(out, sections[i].data, sections[i].len);
	return buf_error(out) < 0 ? err_errno(err, -ENOMEM, "snapshot") : 0;
}

static int damaged(struct err *err, const char *what)
{
	return err_set(err, -EBADMSG, "damaged: %s", what);
}

static int parse_section(struct image *image, const uint8_t *data, size_t len, size_t floor,
	const struct entry *entry, struct err *err)
{
	uint64_t off = le64_get(entry->off), bytes = le64_get(entry->len);
	const char *name = entry->name;
	size_t name_len = strnlen(name, sizeof(entry->name));

	if (name_len == 0 || name_len == sizeof(entry->name))
		return damaged(err, "a section has no proper name");
	for (size_t i = 0; i < sizeof(entry->name); i++)
		if (i < name_len ? name[i] < '!' || name[i] > '~' : name[i] != '\0')
			return damaged(err, "a section has no proper name");
	for (unsigned int i = 0; i < image->nr; i++)
		if (!strcmp(image->sections[i].name, name))
			return damaged(err, "two sections have the same name");
	if (off < floor || off > len || bytes > len - off)
		return damaged(err, "a section lies outside of the file");
	if (image_checksum(data + off, bytes) != le64_get(entry->checksum))
		return err_set(
			err, -EBADMSG, "damaged: the section '%s' is not as it was written", name);
	memcpy(image->sections[image->nr].name, name, name_len + 1);
	image->sections[image->nr].data = data + off;
	image->sections[image->nr].len = bytes;
	image->nr++;
	return 0;
}

int image_parse(struct image *ret_image, const void *data, size_t len, struct err *err)
{
	struct entry table[IMAGE_SECTIONS_MAX];
	struct header header;
	struct image image = {0};
	size_t table_bytes;
	uint32_t nr;
	int r = 0;

	if (len < sizeof(header))
		return err_set(err, -EBADMSG, "no snapshot: too short");
	memcpy(&header, data, sizeof(header));
	if (memcmp(header.magic, magic, sizeof(magic)) != 0)
		return err_set(err, -EBADMSG, "no snapshot");
	if (le32_get(header.format) != IMAGE_FORMAT)
		return err_set(err, -ENOTSUP,
			"written in format %u, and this version of mayfly reads format %u",
			le32_get(header.format), IMAGE_FORMAT);
	nr = le32_get(header.nr_sections);
	if (nr > IMAGE_SECTIONS_MAX)
		return damaged(err, "too many sections");
	table_bytes = nr * sizeof(table[0]);
	if (le64_get(header.total_bytes) != len)
		return damaged(err, "the file is not as long as it was");
	if (table_bytes > len - sizeof(header))
		return damaged(err, "the table of sections is cut off");
	memcpy(table, (const uint8_t *)data + sizeof(header), table_bytes);
	if (table_checksum(&header, table) != le64_get(header.checksum))
		return damaged(err, "the header is not as it was written");
	memcpy(image.id.bytes, header.id, sizeof(header.id));
	memcpy(image.parent.bytes, header.parent, sizeof(header.parent));
	if (snapshot_id_none(&image.id) || snapshot_id_equal(&image.id, &image.parent))
		return damaged(err, "it has no proper id");
	for (uint32_t i = 0; i < nr && r == 0; i++)
		r = parse_section(&image, data, len, sizeof(header) + table_bytes, &table[i], err);
	if (r == 0)
		*ret_image = image;
	return r;
}

int image_section(const struct image *image, const char *name, const void **ret_data,
	size_t *ret_len, struct err *err)
{
	for (unsigned int i = 0; i < image->nr; i++) {
		if (strcmp(image->sections[i].name, name) != 0)
			continue;
		*ret_data = image->sections[i].data;
		*ret_len = image->sections[i].len;
		return 0;
	}
	return err_set(err, -ENOENT, "the section '%s' is missing", name);
}
