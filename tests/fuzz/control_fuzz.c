// SPDX-License-Identifier: Apache-2.0
// Fuzzes the control socket: bytes of requests in any pieces, from two clients that may leave at
// any time, to methods that answer at once, later, or not. Every line that comes back is JSON-RPC.
//
// Input: operations of a byte each: a client, what it does, and how many of the bytes that follow
// it sends.
#include <errno.h>
#include <jansson.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"
#include "vmm/control.h"
#include "vmm/loop.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CLIENTS 2
#define OPS_MAX 200
#define TURNS   8

static struct loop loop;
static struct control *control;
static char dir[] = "/tmp/mayfly-control-XXXXXX";
static struct control_client *later[CLIENTS];
static unsigned int nr_gone;
static int fds[CLIENTS];

static int on_call(void *opaque, struct control_client *client, const char *method,
	const json_t *params, int fd, struct err *err)
{
	(void)opaque;
	FUZZ_CHECK(!params || json_is_object(params));
	fd_close(&fd);
	if (method[0] == 'l')
		for (size_t i = 0; i < CLIENTS; i++)
			if (!later[i]) {
				later[i] = client;
				return 0;
			}
	if (method[0] == 'f')
		return err_set(err, -EBUSY, "%s", method);
	if (method[0] != 'e')
		return CONTROL_NO_METHOD;
	control_reply(client, params ? json_deep_copy(params) : NULL);
	return 0;
}

static void on_gone(void *opaque, struct control_client *client)
{
	(void)opaque;
	nr_gone++;
	for (size_t i = 0; i < CLIENTS; i++)
		if (later[i] == client)
			later[i] = NULL;
}

static void clean_up(void)
{
	char path[64];

	control_destroy(control);
	loop_fini(&loop);
	snprintf(path, sizeof(path), "%s/" CONTROL_SOCKET, dir);
	unlink(path);
	rmdir(dir);
}

static void set_up(void)
{
	const struct control_config config = {
		.loop = &loop, .dir = dir, .call = on_call, .gone = on_gone};

	FUZZ_CHECK(mkdtemp(dir));
	FUZZ_CHECK(loop_init(&loop, NULL) == 0);
	FUZZ_CHECK(control_create(&control, &config, NULL) == 0);
	atexit(clean_up);
}

static void turn(uint64_t wait_ns)
{
	FUZZ_CHECK(loop_turn(&loop, wait_ns, NULL) == 0);
}

static void drop(size_t i)
{
	unsigned int before = nr_gone;

	if (fds[i] < 0)
		return;
	fd_close(&fds[i]);
	while (nr_gone == before)
		turn(UINT64_MAX);
}

static void check_line(const char *line, size_t len)
{
	json_t *reply = json_loadb(line, len, 0, NULL);

	FUZZ_CHECK(json_is_object(reply));
	FUZZ_CHECK(!json_object_get(reply, "result") != !json_object_get(reply, "error"));
	FUZZ_CHECK(json_object_get(reply, "id"));
	json_decref(reply);
}

// What has arrived is in whole lines: the socket has room for them all.
static void read_answers(size_t i)
{
	static char text[1 << 18];
	ssize_t n = recv(fds[i], text, sizeof(text), MSG_DONTWAIT);
	char *start = text, *end;

	if (n <= 0)
		return;
	while ((end = memchr(start, '\n', (size_t)(text + n - start)))) {
		check_line(start, (size_t)(end - start));
		start = end + 1;
	}
	FUZZ_CHECK(start == text + n);
}

static void step(struct fuzz_input *in)
{
	uint8_t op = fuzz_u8(in), len;
	size_t i = op % CLIENTS, n;

	switch (op / CLIENTS % 8) {
	case 0:
		drop(i);
		break;
	case 1:
		if (later[i]) {
			struct control_client *client = later[i];

			later[i] = NULL;
			control_reply(client, NULL);
		}
		break;
	case 2:
		for (int t = 0; t < TURNS; t++)
			turn(0);
		break;
	default:
		len = fuzz_u8(in);
		n = MIN(in->left, (size_t)len);
		if (fds[i] < 0)
			fds[i] = unix_connect(dir, CONTROL_SOCKET, NULL);
		FUZZ_CHECK(fds[i] >= 0);
		send(fds[i], in->data, n, MSG_DONTWAIT | MSG_NOSIGNAL);
		in->data += n;
		in->left -= n;
		if (op & 0x80)
			send(fds[i], "\n", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		turn(0);
	}
	for (size_t k = 0; k < CLIENTS; k++)
		if (fds[k] >= 0)
			read_answers(k);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fuzz_input in = {data, size};

	if (!control)
		set_up();
	for (size_t i = 0; i < CLIENTS; i++)
		fds[i] = -1;
	for (int op = 0; op < OPS_MAX && in.left > 0; op++)
		step(&in);
	for (size_t i = 0; i < CLIENTS; i++)
		drop(i);
	for (size_t i = 0; i < CLIENTS; i++)
		FUZZ_CHECK(!later[i]);
	return 0;
}
