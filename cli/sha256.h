// SPDX-License-Identifier: Apache-2.0
// SHA-256 as text, which images are named after. Any thread.
#ifndef MAYFLY_CLI_SHA256_H
#define MAYFLY_CLI_SHA256_H

#include <nettle/sha2.h>

#define SHA256_TEXT_LEN 64 // in hexadecimal

// Ends the sum, and begins another one.
static inline void sha256_text(struct sha256_ctx *sha, char ret[SHA256_TEXT_LEN + 1])
{
	uint8_t digest[SHA256_DIGEST_SIZE];

	sha256_digest(sha, sizeof(digest), digest);
	for (int i = 0; i < SHA256_TEXT_LEN; i++)
		ret[i] = "0123456789abcdef"[digest[i / 2] >> (i % 2 ? 0 : 4) & 15];
	ret[SHA256_TEXT_LEN] = '\0';
}

#endif
