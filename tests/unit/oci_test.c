// SPDX-License-Identifier: Apache-2.0
// cli/oci: what index, manifest and configuration may say; that nothing in them leads out of the
// folder; and layers over each other.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/oci.h"
#include "vmm/base/fd.h"

#define HEX    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define DIGEST "\"digest\":\"sha256:" HEX "\""
#define OURS   "\"platform\":{\"architecture\":\"amd64\",\"os\":\"linux\"}"

static struct oci_parts parts;

static int manifest(const char *text, struct err *err)
{
	return oci_parse_manifest(text, strlen(text), &parts, err);
}

static void good_manifests(void **state)
{
	struct err err = {0};
	(void)state;

	assert_int_equal(manifest("{\"manifests\":[{" DIGEST "}]}", &err), 0);
	assert_string_equal(parts.next.path, "blobs/sha256/" HEX);
	assert_string_equal(parts.next.sha256, HEX);
#if defined(__x86_64__)
	assert_int_equal(manifest("{\"manifests\":[{\"platform\":{\"architecture\":\"s390x\","
				  "\"os\":\"linux\"}"
				  ",\"digest\":\"nonsense\"},{" OURS "," DIGEST "}]}",
				 &err),
		0);
	assert_string_equal(parts.next.path, "blobs/sha256/" HEX);
#endif
	assert_int_equal(
		manifest("{\"config\":{" DIGEST "},\"layers\":[{" DIGEST "},{" DIGEST "}]}", &err),
		0);
	assert_string_equal(parts.next.path, "");
	assert_string_equal(parts.config.path, "blobs/sha256/" HEX);
	assert_int_equal(parts.nr_layers, 2);
	assert_string_equal(parts.layers[1].sha256, HEX);
}

static void bad_manifests(void **state)
{
	static const struct {
		const char *text;
		int code;
	} bad[] = {
		{"", -EBADMSG},
		{"[]", -EBADMSG},
		{"{}", -EBADMSG},
		{"{\"manifests\":[]}", -ENOENT},
		{"{\"manifests\":7}", -ENOENT},
		{"{\"manifests\":[{\"platform\":{\"architecture\":\"vax\",\"os\":\"linux\"}," DIGEST
		 "}]}",
			-ENOENT},
		{"{\"manifests\":[{\"digest\":\"sha256:../../etc/passwd\"}]}", -EBADMSG},
		{"{\"manifests\":[{\"digest\":\"sha256:" HEX "0\"}]}", -EBADMSG},
		{"{\"manifests\":[{\"digest\":\"sha512:" HEX "\"}]}", -EBADMSG},
		{"{\"manifests\":[{}]}", -EBADMSG},
		{"{\"config\":{" DIGEST "}}", -EBADMSG},
		{"{\"config\":{" DIGEST "},\"layers\":[{}]}", -EBADMSG},
		{"{\"config\":7,\"layers\":[]}", -EBADMSG},
	};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct err err = {0};

		assert_int_equal(manifest(bad[i].text, &err), bad[i].code);
		assert_true(err.msg[0]);
	}
}

static void too_many_layers(void **state)
{
	static char text[(OCI_LAYERS_MAX + 1) * 8 + 64];
	struct err err = {0};
	size_t len;
	(void)state;

	for (int over = 0; over <= 1; over++) {
		len = (size_t)sprintf(text, "[{\"Config\":\"c\",\"Layers\":[\"l\"");
		for (int i = 1; i < OCI_LAYERS_MAX + over; i++)
			len += (size_t)sprintf(text + len, ",\"l\"");
		len += (size_t)sprintf(text + len, "]}]");
		assert_int_equal(oci_parse_docker(text, len, &parts, &err), over ? -EBADMSG : 0);
	}
}

static void docker(void **state)
{
	static const char good[] = "[{\"Config\":\"abc.json\",\"RepoTags\":[\"x:y\"],"
				   "\"Layers\":[\"a/layer.tar\",\"b/layer.tar\"]}]";
	static const char two[] =
		"[{\"Config\":\"a\",\"Layers\":[]},{\"Config\":\"b\",\"Layers\":[]}]";
	struct err err = {0};
	(void)state;

	assert_int_equal(oci_parse_docker(good, strlen(good), &parts, &err), 0);
	assert_string_equal(parts.config.path, "abc.json");
	assert_int_equal(parts.nr_layers, 2);
	assert_string_equal(parts.layers[0].path, "a/layer.tar");
	assert_int_equal(oci_parse_docker(two, strlen(two), &parts, &err), -EINVAL);
	assert_int_equal(oci_parse_docker("{}", 2, &parts, &err), -EBADMSG);
	assert_int_equal(oci_parse_docker("[{}]", 4, &parts, &err), -EBADMSG);
}

static void configs(void **state)
{
	static const char good[] =
		"{\"os\":\"linux\",\"config\":{\"Env\":[\"A=1\"],\"User\":\"\",\"Cmd\":null,"
		"\"Entrypoint\":[],\"WorkingDir\":\"/w\",\"Labels\":{}}}";
	struct err err = {0};
	json_t *config = NULL;
	(void)state;

	assert_int_equal(oci_parse_config(good, strlen(good), &config, &err), 0);
	assert_int_equal(json_object_size(config), 2);
	assert_string_equal(json_string_value(json_object_get(config, "workdir")), "/w");
	assert_int_equal(json_array_size(json_object_get(config, "env")), 1);
	json_decref(config);
	assert_int_equal(oci_parse_config("{}", 2, &config, &err), 0);
	assert_int_equal(json_object_size(config), 0);
	json_decref(config);
	assert_int_equal(oci_parse_config("[]", 2, &config, &err), -EBADMSG);
	assert_int_equal(oci_parse_config("{\"os\":\"plan9\"}", 14, &config, &err), -ENOENT);
	assert_int_equal(
		oci_parse_config("{\"architecture\":\"vax\"}", 22, &config, &err), -ENOENT);
}

// --- Folders ---------------------------------------------------------------------------------

static char top[64];

static int make_top(void **state)
{
	(void)state;
	strcpy(top, "/tmp/mayfly-oci-XXXXXX");
	return mkdtemp(top) ? chdir(top) : -1;
}

static int remove_top(void **state)
{
	char command[128];
	(void)state;

	snprintf(command, sizeof(command), "rm -rf %s", top);
	return chdir("/") < 0 || system(command) != 0 ? -1 : 0;
}

static void sh(const char *script)
{
	assert_int_equal(system(script), 0);
}

static int open_dir(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	assert_true(fd >= 0);
	return fd;
}

static int try_open(int dir_fd, const char *path, const char *sum, struct err *err)
{
	struct oci_blob blob = {0};

	strcpy(blob.path, path);
	strcpy(blob.sha256, sum);
	return oci_open(dir_fd, &blob, err);
}

static void nothing_leads_out(void **state)
{
	static const char *const out[] = {
		"../secret", "/etc/passwd", "up/secret", "abs", "sub", "missing", "fifo"};
	struct err err = {0};
	int dir_fd, fd;
	(void)state;

	sh("echo secret >secret; mkdir -p in/sub; ln -s .. in/up; ln -s /etc/passwd in/abs;"
	   "mkfifo in/fifo; printf abc >in/file; ln -s ../file in/sub/link");
	dir_fd = open_dir("in");
	for (size_t i = 0; i < ARRAY_SIZE(out); i++)
		assert_true(try_open(dir_fd, out[i], "", &err) < 0);
	fd = try_open(dir_fd, "sub/link", "", &err); // as old archives have them
	assert_true(fd >= 0);
	fd_close(&fd);
	fd = try_open(dir_fd, "file",
		"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", &err);
	assert_true(fd >= 0);
	assert_int_equal(lseek(fd, 0, SEEK_CUR), 0);
	fd_close(&fd);
	assert_int_equal(try_open(dir_fd, "file", HEX, &err), -EBADMSG);
	fd_close(&dir_fd);
}

static void layouts(void **state)
{
	struct err err = {0};
	json_t *config = NULL;
	int dir_fd;
	(void)state;

	sh("mkdir -p l/blobs/sha256; cd l; echo '{}' >oci-layout;"
	   "put() { printf '%s' \"$1\" >blob; sum=$(sha256sum <blob | cut -d' ' -f1);"
	   "  mv blob blobs/sha256/$sum; };"
	   "put layer; layer=$sum; put '{\"config\":{\"User\":\"me\"}}'; config=$sum;"
	   "put '{\"config\":{\"digest\":\"sha256:'$config'\"},"
	   "  \"layers\":[{\"digest\":\"sha256:'$layer'\"}]}'; manifest=$sum;"
	   // An index in an index.
	   "put '{\"manifests\":[{\"digest\":\"sha256:'$manifest'\"}]}';"
	   "echo '{\"manifests\":[{\"digest\":\"sha256:'$sum'\"}]}' >index.json");
	dir_fd = open_dir("l");
	assert_true(oci_is_layout(dir_fd));
	assert_int_equal(oci_read(dir_fd, &parts, &config, &err), 0);
	assert_int_equal(parts.nr_layers, 1);
	assert_string_equal(json_string_value(json_object_get(config, "user")), "me");
	json_decref(config);
	// A content that is another than its name says.
	sh("cd l; for f in blobs/sha256/*; do echo >>$f; done");
	assert_int_equal(oci_read(dir_fd, &parts, &config, &err), -EBADMSG);
	sh("rm l/index.json");
	assert_false(oci_is_layout(dir_fd));
	fd_close(&dir_fd);
}

static void endless_indexes(void **state)
{
	struct err err = {0};
	json_t *config = NULL;
	int dir_fd;
	(void)state;

	sh("mkdir -p e/blobs/sha256; cd e; echo '{}' >oci-layout; text='{\"manifests\":[]}';"
	   "for i in 1 2 3 4 5 6; do printf '%s' \"$text\" >blob;"
	   "  sum=$(sha256sum <blob | cut -d' ' -f1); mv blob blobs/sha256/$sum;"
	   "  text='{\"manifests\":[{\"digest\":\"sha256:'$sum'\"}]}'; done;"
	   "printf '%s' \"$text\" >index.json");
	dir_fd = open_dir("e");
	assert_int_equal(oci_read(dir_fd, &parts, &config, &err), -EBADMSG);
	assert_non_null(strstr(err.msg, "without end"));
	fd_close(&dir_fd);
}

static void merge(const char *script)
{
	struct err err = {0};
	int tree_fd, layer_fd;

	sh(script);
	tree_fd = open_dir("tree");
	layer_fd = open_dir("layer");
	assert_int_equal(oci_merge(tree_fd, layer_fd, &err), 0);
	fd_close(&tree_fd);
	fd_close(&layer_fd);
}

static void layers(void **state)
{
	(void)state;

	merge("mkdir -p tree/etc tree/gone/deep tree/opaque/old tree/was-dir/x layer/etc "
	      "layer/opaque"
	      " layer/new/sub;"
	      "echo a >tree/etc/a; echo b >tree/etc/b; echo c >tree/was-file; ln -s etc tree/link;"
	      "echo B >layer/etc/b; touch layer/etc/.wh.a layer/.wh.gone layer/.wh.not-there"
	      " layer/opaque/.wh..wh..opq layer/new/sub/.wh.x layer/.wh..wh.plnk;"
	      "echo new >layer/opaque/file; ln layer/opaque/file layer/new/hard;"
	      "mkdir layer/was-file; echo f >layer/was-dir; mkdir layer/link; echo in "
	      ">layer/link/f;"
	      "chmod 0711 layer/etc; chmod 1777 layer/new");
	sh("[ ! -e tree/etc/a ] && [ $(cat tree/etc/b) = B ] && [ ! -e tree/gone ]");
	sh("[ ! -e tree/opaque/old ] && [ $(cat tree/opaque/file) = new ]");
	sh("[ tree/opaque/file -ef tree/new/hard ] && [ -d tree/was-file ] && [ -f tree/was-dir ]");
	// A folder takes the place of a link: what it led to is as it was.
	sh("[ ! -L tree/link ] && [ $(cat tree/link/f) = in ] && [ ! -e tree/etc/f ]");
	sh("[ $(stat -c %a tree/etc) = 711 ] && [ $(stat -c %a tree/new) = 1777 ]");
	sh("[ -z \"$(find tree -name '.wh.*')\" ]");
}

static void layers_do_not_escape(void **state)
{
	(void)state;

	// A lower layer's link out of the tree, and an upper one that writes, empties and removes
	// through it.
	merge("rm -rf tree layer; mkdir -p outside/keep tree layer/a layer/b layer/c;"
	      "echo safe >outside/file; for l in a b c; do ln -s ../outside tree/$l; done;"
	      "ln -s ../../outside layer/a/x; touch layer/a/file layer/b/.wh..wh..opq"
	      " layer/c/.wh.file layer/c/.wh.keep layer/.wh... layer/.wh..");
	sh("[ \"$(cat outside/file)\" = safe ] && [ -d outside/keep ]");
	sh("[ \"$(ls outside)\" = \"file\nkeep\" ] && [ -d tree/a ] && [ ! -L tree/a ]");
}

static void too_deep(void **state)
{
	struct err err = {0};
	int tree_fd, layer_fd;
	(void)state;

	sh("rm -rf tree layer; mkdir tree layer; cd layer; i=0;"
	   "while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done");
	tree_fd = open_dir("tree");
	layer_fd = open_dir("layer");
	assert_int_equal(oci_merge(tree_fd, layer_fd, &err), -ELOOP);
	fd_close(&tree_fd);
	fd_close(&layer_fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(good_manifests),
		cmocka_unit_test(bad_manifests),
		cmocka_unit_test(too_many_layers),
		cmocka_unit_test(docker),
		cmocka_unit_test(configs),
		cmocka_unit_test_setup_teardown(nothing_leads_out, make_top, remove_top),
		cmocka_unit_test_setup_teardown(layouts, make_top, remove_top),
		cmocka_unit_test_setup_teardown(endless_indexes, make_top, remove_top),
		cmocka_unit_test_setup_teardown(layers, make_top, remove_top),
		cmocka_unit_test_setup_teardown(layers_do_not_escape, make_top, remove_top),
		cmocka_unit_test_setup_teardown(too_deep, make_top, remove_top),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
