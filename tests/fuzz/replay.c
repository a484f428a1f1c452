// SPDX-License-Identifier: Apache-2.0
// main() of a fuzzer outside of the fuzz configuration: gives it the files named on the command
// line, one by one, and then the empty input.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define INPUT_MAX_BYTES (1U << 20)

int main(int argc, char **argv)
{
	uint8_t *buf = malloc(INPUT_MAX_BYTES);

	if (!buf)
		return 1;
	for (int i = 1; i < argc; i++) {
		FILE *f = fopen(argv[i], "rb");
		size_t len;
		uint8_t *exact;

		if (!f) {
			perror(argv[i]);
			return 1;
		}
		len = fread(buf, 1, INPUT_MAX_BYTES, f);
		fclose(f);
		// A buffer of the exact size, so that ASan sees a read past its end.
		exact = malloc(len ? len : 1);
		if (!exact)
			return 1;
		for (size_t k = 0; k < len; k++)
			exact[k] = buf[k];
		LLVMFuzzerTestOneInput(exact, len);
		free(exact);
	}
	LLVMFuzzerTestOneInput(buf, 0);
	free(buf);
	printf("%d inputs replayed\n", argc - 1);
	return 0;
}
