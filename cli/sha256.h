// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4), which images are named after. Pure; any thread.
#ifndef MAYFLY_CLI_SHA256_H
#define MAYFLY_CLI_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_TEXT_LEN 64 // in hexadecimal

struct sha256 {
	uint32_t state[8];
	uint8_t block[64];
	uint64_t len_bytes; // so far
};

void sha256_init(struct sha256 *sha);
void sha256_add(struct sha256 *sha, const void *data, size_t len);

// The end: nothing may be added after it.
void sha256_text(struct sha256 *sha, char ret[SHA256_TEXT_LEN + 1]);

#endif
