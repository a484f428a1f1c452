// SPDX-License-Identifier: Apache-2.0
// What a terminal has shown before, to be shown again on another one. Shown as it was, questions in
// it would be answered once more, and the answers typed into the command: so what asks, and what
// does more than move, draw and set the usual modes, is left out. Any thread.
#ifndef MAYFLY_CLI_SCROLLBACK_H
#define MAYFLY_CLI_SCROLLBACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SCROLLBACK_SEQUENCE_MAX 64 // longer ones are left out

struct scrollback {
	enum scrollback_state {
		SCROLLBACK_TEXT,
		SCROLLBACK_LINE, // the beginning is gone: what follows counts from the next line,
				 // or sequence, on
		SCROLLBACK_C1, // behind 0xc2, the first byte of a control character in UTF-8
		SCROLLBACK_ESCAPE,
		SCROLLBACK_CSI,
		SCROLLBACK_STRING,
		SCROLLBACK_STRING_ESCAPE,
	} state;
	size_t len;
	uint8_t held[SCROLLBACK_SEQUENCE_MAX]; // of a sequence that has not ended
};

// Room in out for what `len` bytes may become.
#define SCROLLBACK_ROOM(len) ((len) + SCROLLBACK_SEQUENCE_MAX)

// Takes the next bytes, in any pieces; returns how many of out are to be shown. The first call is
// for a zeroed structure, with the state SCROLLBACK_LINE where the beginning is missing.
size_t scrollback_filter(struct scrollback *s, const uint8_t *in, size_t len, uint8_t *out);

#endif
