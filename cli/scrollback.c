// SPDX-License-Identifier: Apache-2.0
// Old output for a terminal; see the header. Any thread.
#include "cli/scrollback.h"

#include <string.h>

#include "vmm/base/util.h"

#define ESC 0x1b
#define BEL 0x07
#define ENQ 0x05
#define CAN 0x18
#define SUB 0x1a

// Whether a whole sequence ESC [ … only draws, moves or sets a mode that our terminal is given back
// when we leave.
static bool csi_is_harmless(const uint8_t *s, size_t len)
{
	uint8_t last = s[len - 1], before = s[len - 2];

	if (s[2] == '?')
		return len > 3 && strchr("hlJK", last) && before >= '0' && before <= '9';
	if (s[2] >= '<' && s[2] <= '>')
		return false;
	if (before == '!' || before == ' ') // soft reset; shape of the cursor
		return last == (before == '!' ? 'p' : 'q');
	if (before >= 0x20 && before <= 0x2f)
		return false;
	return !strchr("cintxpqvwy", last);
}

static void hold(struct scrollback *s, uint8_t c)
{
	if (s->len < sizeof(s->held))
		s->held[s->len++] = c;
}

static size_t show(struct scrollback *s, uint8_t *out)
{
	size_t n = s->len;

	memcpy(out, s->held, n);
	s->len = 0;
	s->state = SCROLLBACK_TEXT;
	return n;
}

static void begin(struct scrollback *s, enum scrollback_state state, uint8_t c)
{
	s->state = state;
	s->len = 0;
	hold(s, c);
}

static size_t on_text(struct scrollback *s, uint8_t c, uint8_t *out)
{
	if (c == ESC) {
		begin(s, SCROLLBACK_ESCAPE, c);
	} else if (c == 0xc2) {
		begin(s, SCROLLBACK_C1, c);
	} else if (c != ENQ) {
		*out = c;
		return 1;
	}
	return 0;
}

static size_t on_escape(struct scrollback *s, uint8_t c, uint8_t *out)
{
	hold(s, c);
	if (c == '[')
		s->state = SCROLLBACK_CSI;
	else if (strchr("]PX^_", c) && c)
		s->state = SCROLLBACK_STRING;
	else if (c == 'Z' || c < 0x20 || c > 0x7e)
		s->state = SCROLLBACK_TEXT;
	else if (c >= 0x30)
		return show(s, out);
	return 0; // 0x20 to 0x2f: more to come
}

static size_t on_csi(struct scrollback *s, uint8_t c, uint8_t *out)
{
	hold(s, c);
	if (c < 0x20 || c > 0x7e) {
		s->state = SCROLLBACK_TEXT;
		return 0;
	}
	if (c < 0x40)
		return 0;
	s->state = SCROLLBACK_TEXT;
	return s->len < sizeof(s->held) && csi_is_harmless(s->held, s->len) ? show(s, out) : 0;
}

static size_t step(struct scrollback *s, uint8_t c, uint8_t *out)
{
	switch (s->state) {
	case SCROLLBACK_TEXT:
		return on_text(s, c, out);
	case SCROLLBACK_LINE:
		if (c == '\n')
			s->state = SCROLLBACK_TEXT;
		// What fills a terminal may go without newlines, and places what it writes.
		return c == ESC ? on_text(s, c, out) : 0;
	case SCROLLBACK_C1:
		s->state = SCROLLBACK_TEXT;
		if (c >= 0x80 && c <= 0x9f)
			return 0;
		if (c < 0x80 || c > 0xbf) // not UTF-8 at all
			return on_text(s, c, out);
		hold(s, c);
		return show(s, out);
	case SCROLLBACK_ESCAPE:
	case SCROLLBACK_CSI:
		if (c == ESC) { // the one before was cut
			begin(s, SCROLLBACK_ESCAPE, c);
			return 0;
		}
		return s->state == SCROLLBACK_ESCAPE ? on_escape(s, c, out) : on_csi(s, c, out);
	case SCROLLBACK_STRING:
		if (c == BEL || c == CAN || c == SUB)
			s->state = SCROLLBACK_TEXT;
		else if (c == ESC)
			s->state = SCROLLBACK_STRING_ESCAPE;
		return 0;
	case SCROLLBACK_STRING_ESCAPE:
		if (c == '\\') {
			s->state = SCROLLBACK_TEXT;
			return 0;
		}
		begin(s, SCROLLBACK_ESCAPE, ESC);
		return on_escape(s, c, out);
	}
	return 0;
}

size_t scrollback_filter(struct scrollback *s, const uint8_t *in, size_t len, uint8_t *out)
{
	size_t n = 0;

	for (size_t i = 0; i < len; i++) {
		n += step(s, in[i], out + n);
		ASSERT(n <= SCROLLBACK_ROOM(i + 1));
	}
	return n;
}
