// SPDX-License-Identifier: Apache-2.0
// Images of containers, as files: an OCI layout (its image specification, v1) or what `docker save`
// writes. What they say comes from anybody. One thread.
#ifndef MAYFLY_CLI_OCI_H
#define MAYFLY_CLI_OCI_H

#include <jansson.h>

#include "cli/sha256.h"
#include "vmm/base/err.h"

#define OCI_LAYERS_MAX 512
#define OCI_PATH_BYTES 256
#define OCI_JSON_BYTES (4U << 20)

// A file in the folder, and its checksum where it is known.
struct oci_blob {
	char path[OCI_PATH_BYTES]; // from the folder
	char sha256[SHA256_TEXT_LEN + 1]; // "": not known
};

// What a list of manifests or a manifest names: of an index the entry for this machine's
// processor (another index or a manifest), of a manifest the configuration and the layers.
struct oci_parts {
	struct oci_blob next; // path is "" when this is a manifest
	struct oci_blob config;
	struct oci_blob layers[OCI_LAYERS_MAX]; // the lowest first
	unsigned int nr_layers;
};

// The texts of index.json and of manifests; of docker's manifest.json. -EBADMSG, or -ENOENT if
// there is none for this processor.
int oci_parse_manifest(const char *text, size_t len, struct oci_parts *ret_parts, struct err *err);
int oci_parse_docker(const char *text, size_t len, struct oci_parts *ret_parts, struct err *err);

// The configuration, as in struct rootfs; *ret_config is the caller's.
int oci_parse_config(const char *text, size_t len, json_t **ret_config, struct err *err);

// Whether the folder holds such an image.
bool oci_is_layout(int dir_fd);

// Reads it all. Returns the layers in *ret_parts.
int oci_read(int dir_fd, struct oci_parts *ret_parts, json_t **ret_config, struct err *err);

// Opens a file of the folder, without leaving it, after comparing its checksum. Returns the fd, the
// caller's.
int oci_open(int dir_fd, const struct oci_blob *blob, struct err *err);

// Puts the tree of a layer, which it uses up, over the tree of those below it, and does what its
// whiteouts say. Nothing outside of the two is touched.
int oci_merge(int tree_fd, int layer_fd, struct err *err);

#endif
