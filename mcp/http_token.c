// SPDX-License-Identifier: Apache-2.0
// The token's file; see the header. Any thread.
#include "mcp/http_token.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define RANDOM_BYTES 32
#define SHORTEST     16U

static int make(const char *path, struct err *err)
{
	CLEANUP_FD int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	char text[2 * RANDOM_BYTES + 2];
	uint8_t random[RANDOM_BYTES];
	int r;

	if (fd < 0)
		return errno == EEXIST ? 0 : err_errno(err, -errno, "%s", path);
	if (getrandom(random, sizeof(random), 0) != sizeof(random))
		return err_errno(err, -EIO, "getrandom");
	for (size_t i = 0; i < sizeof(random); i++)
		snprintf(text + 2 * i, 3, "%02x", random[i]);
	text[sizeof(text) - 2] = '\n';
	r = fd_write_all(fd, text, sizeof(text) - 1);
	return r < 0 ? err_errno(err, r, "%s", path) : 0;
}

int http_token_load(const char *path, bool create, char ret[HTTP_TOKEN_BYTES], struct err *err)
{
	int r = create ? make(path, err) : 0;
	CLEANUP_FD int fd = r < 0 ? -1 : open(path, O_RDONLY | O_CLOEXEC);
	char text[HTTP_TOKEN_BYTES] = "";
	struct stat st;
	ssize_t n;

	if (r < 0)
		return r;
	if (fd < 0 || fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s", path);
	if (st.st_mode & 077)
		return err_set(err, -EPERM, "%s: others may read it: chmod 600 %s", path, path);
	n = fd_read_full(fd, text, sizeof(text) - 1);
	if (n < 0)
		return err_errno(err, (int)n, "%s", path);
	while (n && strchr("\r\n \t", text[n - 1]))
		n--;
	text[n] = '\0';
	for (ssize_t i = 0; i < n; i++)
		if (text[i] <= ' ' || text[i] >= 0x7f)
			n = 0;
	if (n < (ssize_t)SHORTEST || st.st_size >= HTTP_TOKEN_BYTES)
		return err_set(err, -EINVAL,
			"%s: no token: one line of %u to %u visible ASCII characters%s", path,
			SHORTEST, HTTP_TOKEN_BYTES - 2,
			create ? " (remove the file, and a new one is made)" : "");
	memcpy(ret, text, sizeof(text));
	return 0;
}
