// SPDX-License-Identifier: Apache-2.0
// JSON-RPC to a monitor; see the header. One thread.
#include "cli/control_client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"
#include "vmm/control.h"

int control_connect(const char *run_dir, struct err *err)
{
	return unix_connect(run_dir, CONTROL_SOCKET, err);
}

static int send_line(
	int fd, const char *text, size_t len, const int *pass_fds, unsigned int nr_pass)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof(int) * CONTROL_FDS_MAX)];
	} control = {0};
	struct iovec iov = {(void *)(uintptr_t)text, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (nr_pass > 0) {
		struct cmsghdr *c;

		ASSERT(nr_pass <= CONTROL_FDS_MAX);
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * nr_pass);
		c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * nr_pass);
		memcpy(CMSG_DATA(c), pass_fds, sizeof(int) * nr_pass);
	}
	// A line is short: a socket that has just been made takes it at once.
	return sendmsg(fd, &msg, MSG_NOSIGNAL) == (ssize_t)len ? 0 : -EPIPE;
}

// Reads one line.
static int receive_line(
	int fd, int cancel_fd, uint64_t deadline_ns, char *line, size_t size, struct err *err)
{
	size_t len = 0;

	for (;;) {
		struct pollfd in[] = {
			{.fd = fd, .events = POLLIN}, {.fd = cancel_fd, .events = POLLIN}};
		uint64_t now = now_ns();
		ssize_t n;

		if (now >= deadline_ns)
			return err_set(err, -ETIMEDOUT, "the monitor does not answer");
		if (poll(in, 2, (int)MIN((deadline_ns - now) / 1000000 + 1, 60000ULL)) <= 0)
			continue;
		if (in[1].revents)
			return err_set(err, -EINTR, "interrupted");
		n = recv(fd, line + len, size - 1 - len, 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return err_set(err, -EPIPE, "the monitor has ended");
		len += (size_t)n;
		line[len] = '\0';
		if (line[len - 1] == '\n')
			return 0;
		if (len == size - 1)
			return err_set(err, -EPROTO, "the monitor's answer is too long");
	}
}

static int call(int fd, const char *method, json_t *params, const int *pass_fds,
	unsigned int nr_pass, int cancel_fd, uint64_t deadline_ns, json_t **ret_result,
	struct err *err)
{
	json_t *request = json_pack("{s:s, s:i, s:s, s:o*}", "jsonrpc", "2.0", "id", 1, "method",
		method, "params", params);
	CLEANUP_FREE char *text = request ? json_dumps(request, JSON_COMPACT) : NULL;
	CLEANUP_FREE char *line = malloc(CONTROL_LINE_BYTES);
	json_t *reply = NULL, *error, *result;
	size_t len;
	int r;

	json_decref(request);
	if (!text || !line)
		return err_errno(err, -ENOMEM, "control socket");
	len = strlen(text);
	text[len] = '\n';
	r = send_line(fd, text, len + 1, pass_fds, nr_pass);
	if (r < 0)
		return err_set(err, r, "the monitor has ended");
	r = receive_line(fd, cancel_fd, deadline_ns, line, CONTROL_LINE_BYTES, err);
	if (r < 0)
		return r;
	reply = json_loads(line, 0, NULL);
	error = json_object_get(reply, "error");
	result = json_object_get(reply, "result");
	if (error) {
		const char *message = json_string_value(json_object_get(error, "message"));
		json_int_t code = json_integer_value(
			json_object_get(json_object_get(error, "data"), "errno"));

		r = err_set(err, code > 0 && code < 4096 ? -(int)code : -EIO, "%s",
			message ? message : "refused");
	} else if (!result) {
		r = err_set(err, -EPROTO, "the monitor's answer makes no sense");
	} else if (ret_result) {
		*ret_result = json_incref(result);
	}
	json_decref(reply);
	return r;
}

int control_call(int fd, const char *method, json_t *params, int pass_fd, uint64_t deadline_ns,
	json_t **ret_result, struct err *err)
{
	return call(fd, method, params, &pass_fd, pass_fd >= 0, -1, deadline_ns, ret_result, err);
}

int control_call_until(int fd, const char *method, json_t *params, int cancel_fd,
	uint64_t deadline_ns, json_t **ret_result, struct err *err)
{
	return call(fd, method, params, NULL, 0, cancel_fd, deadline_ns, ret_result, err);
}

int control_snapshot(int fd, json_t *params, int dir_fd, int cancel_fd, uint64_t deadline_ns,
	json_t **ret_result, struct err *err)
{
	// In the order in which the monitor takes them.
	static const char *const names[CONTROL_FDS_MAX] = {"state", "memory"};
	int files[CONTROL_FDS_MAX] = {-1, -1}, r = 0;

	for (size_t i = 0; i < CONTROL_FDS_MAX && r == 0; i++) {
		files[i] = openat(
			dir_fd, names[i], O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
		if (files[i] < 0)
			r = err_errno(err, -errno, "%s", names[i]);
	}
	if (r == 0)
		r = call(fd, "snapshot", params, files, CONTROL_FDS_MAX, cancel_fd, deadline_ns,
			ret_result, err);
	else
		json_decref(params);
	for (size_t i = 0; i < CONTROL_FDS_MAX; i++)
		fd_close(&files[i]);
	return r;
}
