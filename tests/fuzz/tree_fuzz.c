// SPDX-License-Identifier: Apache-2.0
// tree_receive() against a hostile sender: whatever comes, nothing outside of the folder changes,
// no temporary file stays, and no file descriptor is lost.
//
// Input: byte 0 the options, then steps: 0 an entry (type, mode, and two paths of parts from a
// small set), 1 data, 2 a problem, 3 the end, 4 raw bytes.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest/proto/json.h"
#include "guest/proto/tree.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STREAM_MAX (64U * 1024)

static char base[] = "/tmp/mayfly-tree-fuzz-XXXXXX";
static char out[64];
static uint8_t stream[STREAM_MAX];
static size_t stream_len;

static void add(enum frame_type type, const void *payload, size_t len)
{
	if (stream_len + FRAME_HEADER_BYTES + len > STREAM_MAX)
		return;
	put_le32(stream + stream_len, (uint32_t)len);
	put_le32(stream + stream_len + 4, type);
	if (len)
		memcpy(stream + stream_len + FRAME_HEADER_BYTES, payload, len);
	stream_len += FRAME_HEADER_BYTES + len;
}

// Each four bits are a part.
static void path_of(char *ret, size_t size, uint32_t bits)
{
	static const char *const parts[] = {"", "a", "b", "l", "..", ".", "victim", "file", "a/b",
		"../victim", "/", "out", "l/file", "\x01", "aaaaaaaaaaaaaaaaaaaaaaaa", "b/l/a"};

	ret[0] = '\0';
	for (; bits; bits >>= 4) {
		if (ret[0])
			strncat(ret, "/", size - strlen(ret) - 1);
		strncat(ret, parts[bits & 15], size - strlen(ret) - 1);
	}
}

static void add_entry(const uint8_t *d)
{
	static const char types[] = "dflhpscbdflhdfx";
	char text[1024], path[256], link[256];
	struct json_out json = {.buf = text, .cap = sizeof(text)};

	path_of(path, sizeof(path), get_le32(d + 2) & 0xfffff);
	path_of(link, sizeof(link), get_le32(d + 4) & 0xfffff);
	json_open(&json, '{');
	json_key(&json, "path");
	json_str(&json, path);
	json_key(&json, "type");
	json_str(&json, (const char[]){types[d[0] % (sizeof(types) - 1)], '\0'});
	json_key(&json, "mode");
	json_int(&json, 0700 | d[1]);
	json_key(&json, "link");
	json_str(&json, link);
	if (d[1] & 1) {
		json_key(&json, "mtime_ns");
		json_int(&json, (int64_t)get_le64(d));
	}
	json_close(&json, '}');
	add(FRAME_ENTRY, text, json.len);
}

static void make_stream(const uint8_t *data, size_t size)
{
	stream_len = 0;
	while (size >= 9) {
		size_t len = MIN((size_t)data[1] % 64, size - 2);
		uint8_t payload[64] = {0};

		switch (data[0] % 6) {
		default:
			add_entry(data + 1);
			data += 9;
			size -= 9;
			continue;
		case 1:
			payload[0] = data[2];
			payload[7] = data[2] == 0xff ? 0xff : 0;
			add(FRAME_DATA, payload, FRAME_DATA_HEAD_BYTES + 1 + len % 40);
			len = 1;
			break;
		case 2:
			add(FRAME_PROBLEM, data + 2, len);
			break;
		case 3:
			add(FRAME_END, NULL, 0);
			len = 0;
			break;
		case 4:
			if (stream_len + len <= STREAM_MAX) {
				memcpy(stream + stream_len, data + 2, len);
				stream_len += len;
			}
		}
		data += 2 + len;
		size -= 2 + len;
	}
}

static int forget(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st;
	(void)flag;
	ASSERT(strncmp(path + ftw->base, ".mayfly-", 8) != 0);
	return ftw->level ? remove(path) : 0;
}

static unsigned entries_of(const char *name)
{
	char path[128];
	unsigned n = 0;
	DIR *d;

	snprintf(path, sizeof(path), "%s/%s", base, name);
	d = opendir(path);
	ASSERT(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static void check_victim(void)
{
	char path[128], text[16] = "";
	struct stat st;
	int fd;

	snprintf(path, sizeof(path), "%s/victim/file", base);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	ASSERT(fd >= 0 && fstat(fd, &st) == 0 && read(fd, text, sizeof(text)) == 4);
	fd_close(&fd);
	ASSERT(memcmp(text, "safe", 4) == 0 && st.st_nlink == 1 && (st.st_mode & 07777) == 0604);
	ASSERT(st.st_mtime == 1000000);
	snprintf(path, sizeof(path), "%s/victim", base);
	ASSERT(stat(path, &st) == 0 && (st.st_mode & 07777) == 0705);
	ASSERT(entries_of("victim") == 3 && entries_of("") == 4);
}

static int forget_all(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st;
	(void)flag;
	(void)ftw;
	return remove(path);
}

static void clean_up(void)
{
	nftw(base, forget_all, 64, FTW_DEPTH | FTW_PHYS);
}

static void make_victim(void)
{
	static const struct timespec then[2] = {{.tv_sec = 1000000}, {.tv_sec = 1000000}};
	char path[128];
	int fd;

	ASSERT(mkdtemp(base));
	atexit(clean_up);
	snprintf(out, sizeof(out), "%s/out", base);
	ASSERT(mkdir(out, 0755) == 0);
	snprintf(path, sizeof(path), "%s/victim", base);
	ASSERT(mkdir(path, 0705) == 0 && chmod(path, 0705) == 0);
	snprintf(path, sizeof(path), "%s/victim/file", base);
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0604);
	ASSERT(fd >= 0 && fchmod(fd, 0604) == 0 && fd_write_all(fd, "safe", 4) == 0);
	ASSERT(futimens(fd, then) == 0);
	fd_close(&fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static bool made;
	struct tree_receive how = {.max_bytes = 100000};
	struct tree_receiver *r;
	struct err err = {0};
	size_t cut;
	int rc = 0, before;

	if (!made)
		make_victim();
	made = true;
	if (size < 1)
		return 0;
	how.rename = data[0] & 1 ? "top" : NULL;
	how.owner = (data[0] & 2) && geteuid() == 0;
	how.keep = data[0] & 4;
	cut = (size_t)1 << (data[0] >> 4);
	make_stream(data + 1, size - 1);
	before = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	how.dir_fd = before;
	ASSERT(before >= 0);
	r = tree_receiver_create(&how);
	ASSERT(r);
	for (size_t off = 0; rc == 0 && off < stream_len; off += cut)
		rc = tree_receive(r, stream + off, MIN(cut, stream_len - off), &err);
	ASSERT(rc <= 0 && (rc == 0 || err.code == rc));
	if (rc == 0)
		tree_receiver_finish(r, &err);
	tree_receiver_destroy(r);
	fd_close(&how.dir_fd);
	how.dir_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	ASSERT(how.dir_fd == before); // the lowest that is free: none was lost
	fd_close(&how.dir_fd);
	check_victim();
	ASSERT(nftw(out, forget, 64, FTW_DEPTH | FTW_PHYS) == 0);
	return 0;
}
