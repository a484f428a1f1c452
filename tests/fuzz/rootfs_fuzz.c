// SPDX-License-Identifier: Apache-2.0
// Fuzzes what describes images: our manifest, and of containers' images the index, manifest,
// docker's manifest and configuration. What is accepted stays in its bounds, and names files only
// as it may.
//
// Input: a byte that says which, then the text.
#include <jansson.h>

#include "cli/oci.h"
#include "cli/rootfs_store.h"
#include "tests/support/fuzz_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_blob(const struct oci_blob *blob, bool digest)
{
	size_t len = strnlen(blob->path, sizeof(blob->path));

	FUZZ_CHECK(len > 0 && len < sizeof(blob->path));
	if (!digest)
		return;
	FUZZ_CHECK(strncmp(blob->path, "blobs/sha256/", 13) == 0);
	FUZZ_CHECK(strcmp(blob->path + 13, blob->sha256) == 0);
	FUZZ_CHECK(strlen(blob->sha256) == SHA256_TEXT_LEN && !strchr(blob->sha256, '/'));
}

static void check_parts(const struct oci_parts *parts, bool digest)
{
	FUZZ_CHECK(parts->nr_layers <= OCI_LAYERS_MAX);
	if (parts->next.path[0]) {
		check_blob(&parts->next, true);
		return;
	}
	check_blob(&parts->config, digest);
	for (unsigned int i = 0; i < parts->nr_layers; i++)
		check_blob(&parts->layers[i], digest);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct oci_parts parts;
	struct rootfs image = {0};
	struct err err = {0};
	json_t *config = NULL;
	const char *text = (const char *)data + 1;
	int r;

	if (size == 0)
		return 0;
	size--;
	switch (data[0] % 4) {
	case 0:
		r = rootfs_parse_manifest(text, size, &image, &err);
		FUZZ_CHECK(r == 0 || (err.code == r && err.msg[0] && !image.config));
		FUZZ_CHECK(r < 0 || strlen(image.id) == SHA256_TEXT_LEN);
		rootfs_fini(&image);
		break;
	case 1:
		r = oci_parse_manifest(text, size, &parts, &err);
		if (r == 0)
			check_parts(&parts, true);
		break;
	case 2:
		r = oci_parse_docker(text, size, &parts, &err);
		if (r == 0)
			check_parts(&parts, false);
		break;
	default:
		r = oci_parse_config(text, size, &config, &err);
		FUZZ_CHECK(r == 0 ? json_object_size(config) <= 5 : !config && err.msg[0]);
		json_decref(config);
	}
	return 0;
}
