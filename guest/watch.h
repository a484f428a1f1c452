// SPDX-License-Identifier: Apache-2.0
// Tells what changes in a file or a tree of folders, as it changes. Part of the agent's process for
// files; its only thread.
#ifndef MAYFLY_GUEST_WATCH_H
#define MAYFLY_GUEST_WATCH_H

#include <stdbool.h>
#include <stddef.h>

#include "guest/proto/frame.h"

// Watches until path is gone, or for a file, which may come again, its folder; or until nobody
// listens any more. say() sends a frame and returns false when it could not. Returns 0 when the
// path is gone, else a negative errno.
int watch_path(
	const char *path, bool (*say)(enum frame_type type, const void *payload, size_t len));

#endif
