// SPDX-License-Identifier: Apache-2.0
// Requests to a monitor, over its control socket. One thread.
#ifndef MAYFLY_CLI_CONTROL_CLIENT_H
#define MAYFLY_CLI_CONTROL_CLIENT_H

#include <jansson.h>

#include "vmm/base/err.h"

// Connects to the monitor of the machine whose run folder this is. Returns the fd, the caller's.
// -ENOENT or -ECONNREFUSED where none runs.
int control_connect(const char *run_dir, struct err *err);

// Sends a request and waits for its answer, until deadline_ns (now_ns(); UINT64_MAX: for ever).
// After that, fd is of no more use. params is taken over; pass_fd goes along, -1 for none, and
// stays the caller's. *ret_result (may be NULL) is the caller's. A refusal is an error with the
// monitor's words and errno.
int control_call(int fd, const char *method, json_t *params, int pass_fd, uint64_t deadline_ns,
	json_t **ret_result, struct err *err);

// The same, without a descriptor, or until cancel_fd is readable: -EINTR.
int control_call_until(int fd, const char *method, json_t *params, int cancel_fd,
	uint64_t deadline_ns, json_t **ret_result, struct err *err);

// The request "snapshot": its files are made in dir_fd, and passed. Waits until cancel_fd (-1:
// none) is readable, too: -EINTR.
int control_snapshot(int fd, json_t *params, int dir_fd, int cancel_fd, uint64_t deadline_ns,
	json_t **ret_result, struct err *err);

#endif
