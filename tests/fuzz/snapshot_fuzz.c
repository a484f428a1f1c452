// SPDX-License-Identifier: Apache-2.0
// Fuzzes the two files of a snapshot: whatever is in them, they are refused with a reason, or their
// memory is the same by each way of reading it.
//
// Input: flags, a byte for what fills the file "memory", then the file "state", whose lengths and
// checksums are put right unless a flag says no: damage within is what is looked for. Its section
// "frames" is what a compressed memory has.
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "snapshot/chain.h"
#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STATE_BYTES_MAX 65536U
#define RAM_PAGES       128ULL // of the machine that it is read into
#define LOW_PAGES       50ULL // of them in the first of two regions

#define FLAG_RAW       1 // the state file as it is
#define FLAG_MISMATCH  2 // the trailer of another one
#define FLAG_SHORT     4 // the memory file is cut
#define FLAG_SCRIBBLED 8 // its pages are not what the checksums say

// Offsets of docs/snapshot-format.md.
#define HEADER_BYTES 64U
#define ENTRY_BYTES  48U

static char dir[] = "/tmp/mayfly-snapshot-XXXXXX";
static int dir_fd = -1;

static void clean_up(void)
{
	unlinkat(dir_fd, MEMORY_FILE_NAME, 0);
	rmdir(dir);
}

static void repair(uint8_t *state, size_t size)
{
	uint8_t copy[HEADER_BYTES + IMAGE_SECTIONS_MAX * ENTRY_BYTES];
	size_t table, nr;

	if (size < HEADER_BYTES)
		return;
	memcpy(state, "mayflySS", 8);
	put_le32(state + 8, IMAGE_FORMAT);
	nr = MIN(get_le32(state + 12), (uint32_t)IMAGE_SECTIONS_MAX);
	table = MIN(nr * ENTRY_BYTES, (size - HEADER_BYTES) / ENTRY_BYTES * ENTRY_BYTES);
	put_le64(state + 48, size);
	for (uint8_t *e = state + HEADER_BYTES; e < state + HEADER_BYTES + table;
		e += ENTRY_BYTES) {
		uint64_t off = get_le64(e + 24), len = get_le64(e + 32);

		if (off <= size && len <= size - off)
			put_le64(e + 40, image_checksum(state + off, len));
	}
	put_le64(state + 56, 0);
	memcpy(copy, state, HEADER_BYTES + table);
	put_le64(state + 56, image_checksum(copy, HEADER_BYTES + table));
}

// Where the pages of the memory file end, by an index that is small enough to try; 0: it is not.
static uint64_t memory_end(const uint8_t *index, size_t len)
{
	uint64_t ram_bytes, frames;

	if (len < 16)
		return 0;
	ram_bytes = get_le64(index);
	frames = memory_frames(ram_bytes);
	if (ram_bytes > RAM_PAGES * PAGE_BYTES * 2)
		return 0;
	if (!(get_le32(index + 8) & 2))
		return ram_bytes;
	if (frames == 0 || len < 16 + frames * 8 || get_le64(index + len - 8) > (1U << 22))
		return 0;
	return get_le64(index + len - 8);
}

// A memory file as the state wants it. Its frames are a section of the state.
static void make_memory(const struct image *image, uint8_t flags, uint8_t fill)
{
	uint8_t trailer[40] = "mayflyMM", page[PAGE_BYTES];
	const void *index, *frames;
	uint64_t end = 0;
	size_t len, frames_len;
	int fd = openat(dir_fd, MEMORY_FILE_NAME, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	FUZZ_CHECK(fd >= 0);
	if (image_section(image, MEMORY_SECTION, &index, &len, NULL) == 0)
		end = memory_end(index, len);
	if (end > 0) {
		FUZZ_CHECK(ftruncate(fd,
				   (off_t)(end + PAGE_BYTES - (flags & FLAG_SHORT ? 1 : 0))) == 0);
		memset(page, fill, sizeof(page));
		if (flags & FLAG_SCRIBBLED)
			FUZZ_CHECK(pwrite(fd, page, sizeof(page), 0) == sizeof(page));
		if (image_section(image, "frames", &frames, &frames_len, NULL) == 0)
			FUZZ_CHECK(pwrite(fd, frames, MIN(frames_len, (size_t)end), 0) >= 0);
		memcpy(trailer + 8, image->id.bytes, 16);
		trailer[8] ^= flags & FLAG_MISMATCH ? 1 : 0;
		put_le64(trailer + 24, get_le64(index));
		put_le64(trailer + 32, image_checksum(index, len));
		FUZZ_CHECK(pwrite(fd, trailer, sizeof(trailer), (off_t)end) == sizeof(trailer));
	}
	fd_close(&fd);
}

static void use_memory(struct memory_layer *layer)
{
	static const struct guest_mem_range ranges[] = {{GPA(0), LOW_PAGES * PAGE_BYTES},
		{GPA(4 * GIB), (RAM_PAGES - LOW_PAGES) * PAGE_BYTES}};
	struct guest_mem mapped, read;
	struct chain *chain;
	struct err err = {0};
	int whole = chain_verify_layer(layer, &err), r;

	FUZZ_CHECK(whole == 0 || (whole == -EBADMSG && err.msg[0]));
	r = chain_create(&chain, layer, 1, RAM_PAGES * PAGE_BYTES, &err);
	if (r < 0) {
		FUZZ_CHECK(err.msg[0]);
		return;
	}
	FUZZ_CHECK(guest_mem_init(&mapped, ranges, 2, NULL) == 0);
	FUZZ_CHECK(guest_mem_init(&read, ranges, 2, NULL) == 0);
	r = chain_read(chain, &read, &err);
	FUZZ_CHECK(r == 0 || (r == -EBADMSG && err.msg[0] && whole < 0));
	if (chain_compressed(chain)) {
		FUZZ_CHECK(chain_map(chain, &mapped, &err) == -ENOTSUP);
	} else {
		FUZZ_CHECK(chain_map(chain, &mapped, &err) == 0 && r == 0);
		// In a stranger's file something may be in a hole; then it is not whole.
		for (uint64_t page = 0; whole == 0 && page < RAM_PAGES; page++)
			FUZZ_CHECK(
				memcmp(guest_mem_at(&mapped, page * PAGE_BYTES),
					guest_mem_at(&read, page * PAGE_BYTES), PAGE_BYTES) == 0);
	}
	chain_destroy(chain);
	guest_mem_fini(&mapped);
	guest_mem_fini(&read);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fuzz_input in = {data, size};
	uint8_t flags = fuzz_u8(&in), fill = fuzz_u8(&in), *state;
	struct memory_layer layer = {.fd = -1};
	struct image image;
	struct err err = {0};
	int r;

	if (in.left > STATE_BYTES_MAX)
		return 0;
	if (dir_fd < 0) {
		FUZZ_CHECK(mkdtemp(dir));
		dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		FUZZ_CHECK(dir_fd >= 0);
		atexit(clean_up);
	}
	state = malloc(MAX(in.left, (size_t)1));
	FUZZ_CHECK(state);
	memcpy(state, in.data, in.left);
	if (!(flags & FLAG_RAW))
		repair(state, in.left);
	r = image_parse(&image, state, in.left, &err);
	FUZZ_CHECK(r == 0 || ((r == -EBADMSG || r == -ENOTSUP) && err.msg[0]));
	if (r == 0) {
		for (unsigned int i = 0; i < image.nr; i++)
			FUZZ_CHECK(
				image.sections[i].data >= state &&
				image.sections[i].len <= in.left &&
				image.sections[i].data + image.sections[i].len <= state + in.left);
		make_memory(&image, flags, fill);
		r = memory_open(&layer, dir_fd, &image, &err);
		FUZZ_CHECK(r == 0 || err.msg[0]);
		FUZZ_CHECK(r < 0 || !(flags & (FLAG_MISMATCH | FLAG_SHORT)));
		if (r == 0) {
			use_memory(&layer);
			memory_close(&layer);
		}
	}
	free(state);
	return 0;
}
