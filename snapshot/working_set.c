// SPDX-License-Identifier: Apache-2.0
// The file of a working set; see the header. Any thread.
#include "snapshot/working_set.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "snapshot/memory.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

static const uint8_t magic[8] = {'m', 'a', 'y', 'f', 'l', 'y', 'W', 'S'};

struct header {
	uint8_t magic[8];
	uint8_t id[16];
	le64_t ram_bytes;
	le64_t nr;
	le64_t checksum; // of all of the file, with this field zero
};

#define FILE_BYTES_MAX (sizeof(struct header) + WORKING_SET_FRAMES_MAX * sizeof(uint32_t))

int working_set_parse(struct working_set *ret_set, const void *data, size_t len,
	const struct snapshot_id *id, uint64_t ram_bytes)
{
	uint8_t file[FILE_BYTES_MAX];
	struct header header;
	uint64_t nr;

	if (len < sizeof(header) || len > sizeof(file))
		return -EBADMSG;
	memcpy(file, data, len);
	memcpy(&header, file, sizeof(header));
	nr = le64_get(header.nr);
	memset(file + offsetof(struct header, checksum), 0, sizeof(header.checksum));
	if (memcmp(header.magic, magic, sizeof(magic)) != 0 ||
		memcmp(header.id, id->bytes, sizeof(header.id)) != 0 ||
		le64_get(header.ram_bytes) != ram_bytes || nr > WORKING_SET_FRAMES_MAX ||
		len != sizeof(header) + nr * sizeof(uint32_t) ||
		le64_get(header.checksum) != image_checksum(file, len))
		return -EBADMSG;
	for (uint64_t i = 0; i < nr; i++)
		if (get_le32(file + sizeof(header) + i * sizeof(uint32_t)) >=
			memory_frames(ram_bytes))
			return -EBADMSG;
	ret_set->nr = (uint32_t)nr;
	for (uint64_t i = 0; i < nr; i++)
		ret_set->frames[i] = get_le32(file + sizeof(header) + i * sizeof(uint32_t));
	return 0;
}

void working_set_encode(const struct working_set *set, const struct snapshot_id *id,
	uint64_t ram_bytes, struct buf *out)
{
	struct header header = {.ram_bytes = le64_of(ram_bytes), .nr = le64_of(set->nr)};
	size_t start = out->len;

	ASSERT(set->nr <= WORKING_SET_FRAMES_MAX);
	memcpy(header.magic, magic, sizeof(magic));
	memcpy(header.id, id->bytes, sizeof(header.id));
	buf_append(out, &header, sizeof(header));
	for (uint32_t i = 0; i < set->nr; i++)
		buf_append_le32(out, set->frames[i]);
	if (buf_error(out) < 0)
		return;
	put_le64(out->data + start + offsetof(struct header, checksum),
		image_checksum(out->data + start, out->len - start));
}

int working_set_write(
	int fd, const struct working_set *set, const struct snapshot_id *id, uint64_t ram_bytes)
{
	CLEANUP_BUF struct buf file = {0};

	working_set_encode(set, id, ram_bytes, &file);
	if (buf_error(&file) < 0)
		return -ENOMEM;
	// In one call: machines that write it at once write one over the other, and who reads
	// between them finds it damaged, or whole.
	if (pwrite(fd, file.data, file.len, 0) != (ssize_t)file.len ||
		ftruncate(fd, (off_t)file.len) < 0)
		return errno ? -errno : -EIO;
	return 0;
}

int working_set_read(
	struct working_set *ret_set, int fd, const struct snapshot_id *id, uint64_t ram_bytes)
{
	uint8_t file[FILE_BYTES_MAX + 1];
	ssize_t n = fd_pread_full(fd, file, sizeof(file), 0);

	return n < 0 ? (int)n : working_set_parse(ret_set, file, (size_t)n, id, ram_bytes);
}
