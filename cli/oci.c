// SPDX-License-Identifier: Apache-2.0
// Images of containers; see the header. One thread.
#include "cli/oci.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/openat2.h>

#include "vmm/base/fd.h"

#define INDEX_DEPTH_MAX 4
#define TREE_DEPTH_MAX  256
#define WHITEOUT        ".wh."
#define OPAQUE          ".wh..wh..opq"

#if defined(__x86_64__)
#define ARCHITECTURE "amd64"
#elif defined(__aarch64__)
#define ARCHITECTURE "arm64"
#endif

// --- Texts -----------------------------------------------------------------------------------

static const char *text_of(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	return text ? text : "";
}

// "sha256:HEX" is blobs/sha256/HEX.
static int take_digest(const json_t *descriptor, struct oci_blob *ret)
{
	const char *digest = text_of(descriptor, "digest");

	if (strncmp(digest, "sha256:", 7) != 0)
		return -EBADMSG;
	digest += 7;
	if (strlen(digest) != SHA256_TEXT_LEN ||
		strspn(digest, "0123456789abcdef") != SHA256_TEXT_LEN)
		return -EBADMSG;
	snprintf(ret->path, sizeof(ret->path), "blobs/sha256/%s", digest);
	memcpy(ret->sha256, digest, SHA256_TEXT_LEN + 1);
	return 0;
}

static bool is_ours(const json_t *descriptor)
{
	const json_t *platform = json_object_get(descriptor, "platform");

	return !platform || (!strcmp(text_of(platform, "architecture"), ARCHITECTURE) &&
				    !strcmp(text_of(platform, "os"), "linux"));
}

static int take_layers(const json_t *layers, struct oci_parts *parts,
	int (*take)(const json_t *layer, struct oci_blob *ret), struct err *err)
{
	json_t *layer;
	size_t i;

	if (!json_is_array(layers) || json_array_size(layers) > OCI_LAYERS_MAX)
		return err_set(err, -EBADMSG, "a manifest has up to %d layers", OCI_LAYERS_MAX);
	json_array_foreach(layers, i, layer)
	{
		if (take(layer, &parts->layers[i]) < 0)
			return err_set(err, -EBADMSG, "layer %zu is not named as it should be", i);
	}
	parts->nr_layers = (unsigned int)json_array_size(layers);
	return 0;
}

static int parse_manifest(const json_t *root, struct oci_parts *parts, struct err *err)
{
	const json_t *manifests = json_object_get(root, "manifests");
	json_t *one;
	size_t i;

	if (!json_is_object(root))
		return err_set(err, -EBADMSG, "neither an index nor a manifest");
	if (!manifests) {
		if (take_digest(json_object_get(root, "config"), &parts->config) < 0)
			return err_set(err, -EBADMSG, "a manifest without a configuration");
		return take_layers(json_object_get(root, "layers"), parts, take_digest, err);
	}
	json_array_foreach(manifests, i, one)
	{
		if (!is_ours(one))
			continue;
		return take_digest(one, &parts->next) < 0
			       ? err_set(err, -EBADMSG, "a manifest without a sha256 digest")
			       : 0;
	}
	return err_set(err, -ENOENT, "it has no image for linux/" ARCHITECTURE);
}

int oci_parse_manifest(const char *text, size_t len, struct oci_parts *ret_parts, struct err *err)
{
	json_t *root = json_loadb(text, len, 0, NULL);
	int r;

	memset(ret_parts, 0, sizeof(*ret_parts));
	r = parse_manifest(root, ret_parts, err);
	json_decref(root);
	return r;
}

// A path in the archive. That it stays there is for oci_open() to see to.
static int take_path(const json_t *path, struct oci_blob *ret)
{
	const char *text = json_string_value(path);

	if (!text || !text[0] || strlen(text) >= sizeof(ret->path))
		return -EBADMSG;
	memcpy(ret->path, text, strlen(text) + 1);
	ret->sha256[0] = '\0';
	return 0;
}

int oci_parse_docker(const char *text, size_t len, struct oci_parts *ret_parts, struct err *err)
{
	json_t *root = json_loadb(text, len, 0, NULL);
	json_t *one = json_array_get(root, 0);
	int r = 0;

	memset(ret_parts, 0, sizeof(*ret_parts));
	if (take_path(json_object_get(one, "Config"), &ret_parts->config) < 0)
		r = err_set(err, -EBADMSG, "a manifest without a configuration");
	if (r == 0 && json_array_size(root) > 1)
		r = err_set(err, -EINVAL, "it has %zu images: save one", json_array_size(root));
	if (r == 0)
		r = take_layers(json_object_get(one, "Layers"), ret_parts, take_path, err);
	json_decref(root);
	return r;
}

int oci_parse_config(const char *text, size_t len, json_t **ret_config, struct err *err)
{
	static const struct {
		const char *theirs, *ours;
	} keys[] = {
		{"Env", "env"},
		{"User", "user"},
		{"WorkingDir", "workdir"},
		{"Entrypoint", "entrypoint"},
		{"Cmd", "cmd"},
	};
	json_t *root = json_loadb(text, len, 0, NULL), *config;
	const char *arch = text_of(root, "architecture"), *os = text_of(root, "os");

	if (!json_is_object(root)) {
		json_decref(root);
		return err_set(err, -EBADMSG, "no configuration of an image");
	}
	if ((arch[0] && strcmp(arch, ARCHITECTURE) != 0) || (os[0] && strcmp(os, "linux") != 0)) {
		err_set(err, -ENOENT, "it is for %.20s/%.20s, not for linux/" ARCHITECTURE, os,
			arch);
		json_decref(root);
		return -ENOENT;
	}
	config = json_object();
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		json_t *value = json_object_get(json_object_get(root, "config"), keys[i].theirs);

		// "" and null and [] are ways to say nothing.
		if (json_is_null(value) || (json_is_string(value) && !json_string_length(value)) ||
			(json_is_array(value) && json_array_size(value) == 0))
			value = NULL;
		if (value)
			json_object_set(config, keys[i].ours, value);
	}
	json_decref(root);
	*ret_config = config;
	return 0;
}

// --- Files -----------------------------------------------------------------------------------

static int open_beneath(int dir_fd, const char *path)
{
	// Old archives link layers that are the same to each other: links are followed, inside.
	struct open_how how = {
		.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
	};
	CLEANUP_FD int fd = (int)syscall(SYS_openat2, dir_fd, path, &how, sizeof(how));
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return -errno;
	return S_ISREG(st.st_mode) ? TAKE_FD(fd) : -EINVAL;
}

static int check(int fd, const struct oci_blob *blob, struct err *err)
{
	static uint8_t buf[1U << 20];
	char text[SHA256_TEXT_LEN + 1];
	struct sha256_ctx sha;
	ssize_t n;

	sha256_init(&sha);
	while ((n = fd_read_full(fd, buf, sizeof(buf))) > 0)
		sha256_update(&sha, (size_t)n, buf);
	if (n < 0 || lseek(fd, 0, SEEK_SET) < 0)
		return err_errno(err, n < 0 ? (int)n : -errno, "%s", blob->path);
	sha256_text(&sha, text);
	if (strcmp(text, blob->sha256) != 0)
		return err_set(err, -EBADMSG, "%s: its content is another", blob->path);
	return 0;
}

int oci_open(int dir_fd, const struct oci_blob *blob, struct err *err)
{
	CLEANUP_FD int fd = open_beneath(dir_fd, blob->path);
	int r;

	if (fd < 0)
		return err_errno(err, fd, "%.*s in the image", OCI_PATH_BYTES, blob->path);
	r = blob->sha256[0] ? check(fd, blob, err) : 0;
	return r < 0 ? r : TAKE_FD(fd);
}

static int read_text(
	int dir_fd, const struct oci_blob *blob, char **ret_text, size_t *ret_len, struct err *err)
{
	CLEANUP_FD int fd = oci_open(dir_fd, blob, err);
	CLEANUP_FREE char *text = NULL;
	ssize_t n;

	if (fd < 0)
		return fd;
	text = malloc(OCI_JSON_BYTES);
	if (!text)
		return err_errno(err, -ENOMEM, "%s", blob->path);
	n = fd_read_full(fd, text, OCI_JSON_BYTES);
	if (n < 0 || n == OCI_JSON_BYTES)
		return err_errno(err, n < 0 ? (int)n : -EFBIG, "%s", blob->path);
	*ret_len = (size_t)n;
	*ret_text = TAKE_PTR(text);
	return 0;
}

static bool is_there(int dir_fd, const char *name)
{
	struct stat st;

	return fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode);
}

bool oci_is_layout(int dir_fd)
{
	return is_there(dir_fd, "manifest.json") ||
	       (is_there(dir_fd, "oci-layout") && is_there(dir_fd, "index.json"));
}

int oci_read(int dir_fd, struct oci_parts *ret_parts, json_t **ret_config, struct err *err)
{
	const bool oci = is_there(dir_fd, "index.json");
	struct oci_blob blob = {0};
	char *text = NULL;
	size_t len = 0;
	int r = 0;

	snprintf(blob.path, sizeof(blob.path), "%s", oci ? "index.json" : "manifest.json");
	ret_parts->config.path[0] = '\0';
	for (int depth = 0; r == 0 && !ret_parts->config.path[0]; depth++) {
		if (depth == INDEX_DEPTH_MAX)
			return err_set(
				err, -EBADMSG, "index.json: one index in another without end");
		r = read_text(dir_fd, &blob, &text, &len, err);
		if (r < 0)
			return r;
		r = oci ? oci_parse_manifest(text, len, ret_parts, err)
			: oci_parse_docker(text, len, ret_parts, err);
		free(text);
		if (r < 0)
			return err_wrap(err, r, "%s", blob.path);
		blob = ret_parts->next;
	}
	r = read_text(dir_fd, &ret_parts->config, &text, &len, err);
	if (r < 0)
		return r;
	r = oci_parse_config(text, len, ret_config, err);
	free(text);
	return r < 0 ? err_wrap(err, r, "%s", ret_parts->config.path) : 0;
}

// --- Layers ----------------------------------------------------------------------------------

static int open_dir_at(int dir_fd, const char *name)
{
	int fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

typedef int entry_fn(int dir_fd, const char *name, void *opaque, unsigned int depth);

// Calls each() for what is in the folder now.
static int each_entry(int dir_fd, entry_fn *each, void *opaque, unsigned int depth)
{
	struct dirent **list;
	int n, r = 0;

	if (depth == TREE_DEPTH_MAX)
		return -ELOOP;
	n = scandirat(dir_fd, ".", &list, NULL, NULL);
	if (n < 0)
		return -errno;
	for (int i = 0; i < n; i++) {
		const char *name = list[i]->d_name;

		if (r == 0 && strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
			r = each(dir_fd, name, opaque, depth);
		free(list[i]);
	}
	free(list);
	return r;
}

static int remove_entry(int dir_fd, const char *name, void *opaque, unsigned int depth)
{
	CLEANUP_FD int fd = -1;
	int r;

	if (unlinkat(dir_fd, name, 0) == 0 || errno == ENOENT)
		return 0;
	if (errno != EISDIR)
		return -errno;
	fd = open_dir_at(dir_fd, name);
	if (fd < 0)
		return fd;
	r = each_entry(fd, remove_entry, opaque, depth + 1);
	if (r < 0)
		return r;
	return unlinkat(dir_fd, name, AT_REMOVEDIR) < 0 ? -errno : 0;
}

// Of one folder of the layer: does what its whiteouts say to the same folder of the tree (*opaque,
// -1: it is not there), and removes them.
static int apply_whiteouts(int layer_fd, const char *name, void *opaque, unsigned int depth)
{
	const int tree_fd = *(int *)opaque;
	CLEANUP_FD int sub_layer_fd = -1;
	CLEANUP_FD int sub_tree_fd = -1;
	int r;

	if (strncmp(name, WHITEOUT, strlen(WHITEOUT)) == 0) {
		const char *gone = name + strlen(WHITEOUT);

		r = 0;
		if (tree_fd >= 0 && !strcmp(name, OPAQUE))
			r = each_entry(tree_fd, remove_entry, NULL, depth);
		else if (tree_fd >= 0 && gone[0] && strcmp(gone, ".") != 0 &&
			 strcmp(gone, "..") != 0)
			r = remove_entry(tree_fd, gone, NULL, depth);
		return r < 0 ? r : remove_entry(layer_fd, name, NULL, depth);
	}
	sub_layer_fd = open_dir_at(layer_fd, name);
	if (sub_layer_fd == -ENOTDIR || sub_layer_fd == -ELOOP)
		return 0;
	if (sub_layer_fd < 0)
		return sub_layer_fd;
	if (tree_fd >= 0)
		sub_tree_fd = open_dir_at(tree_fd, name);
	return each_entry(sub_layer_fd, apply_whiteouts, &sub_tree_fd, depth + 1);
}

// Moves one entry of the layer to the tree: a folder that is there on both sides takes the layer's
// mode and owner and what is in it; anything else takes the place of what was there.
static int move_entry(int layer_fd, const char *name, void *opaque, unsigned int depth)
{
	const int tree_fd = *(int *)opaque;
	CLEANUP_FD int sub_layer_fd = -1;
	CLEANUP_FD int sub_tree_fd = -1;
	struct stat st;
	int r;

	sub_layer_fd = open_dir_at(layer_fd, name);
	if (sub_layer_fd >= 0)
		sub_tree_fd = open_dir_at(tree_fd, name);
	if (sub_tree_fd >= 0) {
		if (fstat(sub_layer_fd, &st) < 0 || fchown(sub_tree_fd, st.st_uid, st.st_gid) < 0 ||
			fchmod(sub_tree_fd, st.st_mode & 07777) < 0)
			return -errno;
		return each_entry(sub_layer_fd, move_entry, &sub_tree_fd, depth + 1);
	}
	r = remove_entry(tree_fd, name, NULL, depth);
	if (r < 0)
		return r;
	return renameat(layer_fd, name, tree_fd, name) < 0 ? -errno : 0;
}

int oci_merge(int tree_fd, int layer_fd, struct err *err)
{
	int r = each_entry(layer_fd, apply_whiteouts, &tree_fd, 0);

	if (r == 0)
		r = each_entry(layer_fd, move_entry, &tree_fd, 0);
	return r < 0 ? err_errno(err, r, "putting a layer over those below it") : 0;
}
