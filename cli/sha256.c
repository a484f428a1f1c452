// SPDX-License-Identifier: Apache-2.0
// SHA-256; see the header. The names are those of FIPS 180-4. Pure; any thread.
#include "cli/sha256.h"

#include <endian.h>
#include <string.h>

#include "vmm/base/util.h"

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
static const uint32_t k[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b,
	0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
	0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6,
	0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d,
	0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
	0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585,
	0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
	0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa,
	0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotr(uint32_t x, unsigned int n)
{
	return x >> n | x << (32 - n);
}

static void process(uint32_t state[8], const uint8_t *block)
{
	uint32_t w[64], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4],
			f = state[5], g = state[6], h = state[7];

	for (size_t t = 0; t < 16; t++) {
		memcpy(&w[t], block + 4 * t, 4);
		w[t] = be32toh(w[t]);
	}
	for (int t = 16; t < 64; t++)
		w[t] = (rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ w[t - 2] >> 10) + w[t - 7] +
		       (rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ w[t - 15] >> 3) + w[t - 16];
	for (int t = 0; t < 64; t++) {
		uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) +
			      k[t] + w[t];
		uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) +
			      ((a & b) ^ (a & c) ^ (b & c));

		h = g;
		g = f;
		f = e;
		e = d + t1;
		d = c;
		c = b;
		b = a;
		a = t1 + t2;
	}
	state[0] += a;
	state[1] += b;
	state[2] += c;
	state[3] += d;
	state[4] += e;
	state[5] += f;
	state[6] += g;
	state[7] += h;
}

void sha256_init(struct sha256 *sha)
{
	*sha = (struct sha256){
		.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c,
			0x1f83d9ab, 0x5be0cd19},
	};
}

void sha256_add(struct sha256 *sha, const void *data, size_t len)
{
	const uint8_t *at = data;
	size_t held = sha->len_bytes % 64;

	sha->len_bytes += len;
	if (held) {
		size_t n = MIN(len, 64 - held);

		memcpy(sha->block + held, at, n);
		at += n;
		len -= n;
		if (held + n < 64)
			return;
		process(sha->state, sha->block);
	}
	for (; len >= 64; at += 64, len -= 64)
		process(sha->state, at);
	if (len)
		memcpy(sha->block, at, len);
}

void sha256_text(struct sha256 *sha, char ret[SHA256_TEXT_LEN + 1])
{
	uint64_t bits = htobe64(sha->len_bytes * 8);
	size_t pad = 64 - (sha->len_bytes + 8) % 64;
	uint8_t padding[64] = {0x80};

	sha256_add(sha, padding, pad);
	sha256_add(sha, &bits, sizeof(bits));
	for (int i = 0; i < SHA256_TEXT_LEN; i++)
		ret[i] = "0123456789abcdef"[sha->state[i / 8] >> (28 - 4 * (i % 8)) & 15];
	ret[SHA256_TEXT_LEN] = '\0';
}
