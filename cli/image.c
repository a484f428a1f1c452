// SPDX-License-Identifier: Apache-2.0
// mayfly image: root file systems that machines share. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "cli/rootfs_make.h"
#include "cli/tool.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

static const char help[] =
	"Usage: mayfly image build RELEASE [OPTION]...\n"
	"       mayfly image import NAME FILE|FOLDER|- [--size SIZE]\n"
	"       mayfly image pull REFERENCE [--name NAME] [--size SIZE]\n"
	"       mayfly image ls [--json]\n"
	"       mayfly image inspect NAME\n"
	"       mayfly image verify NAME...\n"
	"       mayfly image rm NAME...\n"
	"\n"
	"Images are root file systems, which machines share and never change: mayfly run, create\n"
	"and up take --image NAME.\n"
	"\n"
	"build makes one from Debian's packages, over the network; RELEASE is debian-11, "
	"debian-12\n"
	"or debian-13.\n"
	"      --packages LIST   more packages, with commas, like git,python3\n"
	"      --name NAME       what it is to be called (default RELEASE)\n"
	"      --mirror URL      where the packages are (default http://deb.debian.org/debian)\n"
	"\n"
	"import takes an archive (- is standard input) or a folder: a root file system, an OCI\n"
	"layout, or what `docker save` or `podman save` writes. Of containers' images the\n"
	"environment, user, working directory and command are kept, as defaults for run and exec.\n"
	"\n"
	"pull fetches a container's image from a registry, through skopeo, with the logins and\n"
	"mirrors that skopeo is set up with; REFERENCE is like debian:12 or\n"
	"registry.example.com/owner/image.\n"
	"      --name NAME       what it is to be called (default the last part of REFERENCE)\n"
	"\n"
	"      --size SIZE       of the disk that a machine sees (default 8G); what is not used "
	"of\n"
	"                        it takes no room\n"
	"  -q, --quiet           no progress on a terminal\n"
	"\n"
	"verify compares the content with the image's checksum. rm refuses what a machine or a\n"
	"snapshot needs.\n";

#define PULLED "pulled.tar"

struct options {
	const char *packages, *name, *mirror;
	uint64_t size_bytes;
	bool quiet, json;
};

// --- Making ----------------------------------------------------------------------------------

// Signals become events, so that what is half made is taken away.
static int take_signals(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGHUP);
	sigprocmask(SIG_BLOCK, &set, NULL);
	return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

// A user other than root has no owners to give to files, but in a user namespace: does it all again
// in one. Returns only if that fails.
static int enter_namespace(char **argv, struct err *err)
{
	static char exe[PATH_MAX];
	static char *again[64] = {"unshare", "--map-root-user", "--map-auto", "--", exe, "image"};
	char images[PATH_MAX], *slash;
	int argc = 6, r = home_images(images, err);

	if (r < 0)
		return r;
	if (!realpath("/proc/self/exe", exe))
		return err_errno(err, -errno, "/proc/self/exe");
	slash = strrchr(images, '/');
	*slash = '\0';
	if (setenv("MAYFLY_HOME", images, 1) < 0)
		return err_errno(err, -errno, "MAYFLY_HOME");
	for (; *argv && argc < (int)ARRAY_SIZE(again) - 1; argv++)
		again[argc++] = *argv;
	execvp(again[0], again);
	return err_errno(err, -errno, "unshare (Debian's package util-linux has it)");
}

static void report(const struct rootfs_make *make, const struct rootfs *image)
{
	printf("%s: image %.12s, %llu MiB\n", make->name, image->id,
		(unsigned long long)(image->data_bytes / MIB));
}

static int make_image(struct rootfs_make *make, const struct options *o, struct err *err)
{
	CLEANUP_ROOTFS struct rootfs image = {0};
	int r;

	make->size_bytes = o->size_bytes ? o->size_bytes : ROOTFS_SIZE_DEFAULT_BYTES;
	make->show_progress = !o->quiet && isatty(STDERR_FILENO);
	r = rootfs_make(make, &image, err);
	if (r == 0)
		report(make, &image);
	return r;
}

static int import(char **args, char **argv, const struct options *o, struct err *err)
{
	const char *from = args[1];
	char source[ROOTFS_SOURCE_MAX + 1], folder[PATH_MAX];
	struct rootfs_make make = {.name = args[0], .source = source};
	CLEANUP_FD int fd = -1;
	struct stat st;
	int r = rootfs_check_name(args[0], err);

	if (r < 0)
		return r;
	if (geteuid() != 0)
		return enter_namespace(argv, err);
	if (!strcmp(from, "-"))
		fd = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 10);
	else
		fd = open(from, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s", from);
	if (!strcmp(from, "-") && isatty(fd))
		return err_set(err, -EINVAL, "standard input is a terminal: want an archive");
	if (S_ISDIR(st.st_mode)) {
		if (!realpath(from, folder))
			return err_errno(err, -errno, "%s", from);
		make.folder = folder;
	}
	snprintf(source, sizeof(source), "%s", strcmp(from, "-") != 0 ? from : "standard input");
	for (char *at = source; *at; at++)
		if ((unsigned char)*at < ' ' || *at == 0x7f)
			*at = '?';
	make.fd = fd;
	make.signal_fd = take_signals();
	r = make_image(&make, o, err);
	fd_close(&make.signal_fd);
	return r;
}

static const struct {
	const char *name, *suite;
} releases[] = {
	{"debian-11", "bullseye"},
	{"debian-12", "bookworm"},
	{"debian-13", "trixie"},
};

struct building {
	const char *name, *doing;
	int fd; // what grows meanwhile, or -1
	bool show;
};

static void show_building(void *opaque)
{
	const struct building *building = opaque;
	struct stat st;

	if (!building->show)
		return;
	fprintf(stderr, "\r\033[K%s: %s", building->name, building->doing);
	if (building->fd >= 0 && fstat(building->fd, &st) == 0 && st.st_size > 0)
		fprintf(stderr, ", %lld MiB", (long long)st.st_size / (long long)MIB);
}

// What the packages leave to the machine that they are installed on.
static const char customize[] =
	"--customize-hook="
	"printf 'mayfly\\n' >\"$1/etc/hostname\" && "
	"printf '127.0.0.1\\tlocalhost mayfly\\n::1\\tlocalhost\\n' >\"$1/etc/hosts\" && "
	": >\"$1/etc/resolv.conf\" && : >\"$1/etc/machine-id\"";

static int build(const char *release, const struct options *o, struct err *err)
{
	char include[4096], source[ROOTFS_SOURCE_MAX + 1], path[PATH_MAX];
	const char *argv[] = {"mmdebstrap", "--variant=minbase", "--format=tar",
		"--skip=output/dev", "--aptopt=Acquire::Languages \"none\"", include, customize,
		NULL, "-", NULL, NULL};
	struct rootfs_make make = {.name = o->name ? o->name : release, .source = source};
	struct building building = {make.name, "fetching and installing packages", -1,
		!o->quiet && isatty(STDERR_FILENO)};
	struct tool tool = {.argv = argv,
		.package = "mmdebstrap",
		.stdin_fd = -1,
		.progress = show_building,
		.opaque = &building};
	CLEANUP_FD int fd = -1;
	int r = rootfs_check_name(make.name, err);

	for (size_t i = 0; i < ARRAY_SIZE(releases); i++)
		if (!strcmp(release, releases[i].name))
			argv[7] = releases[i].suite;
	if (!argv[7])
		return err_set(err, -EINVAL, "'%.40s' is none of debian-11, debian-12, debian-13",
			release);
	argv[9] = o->mirror;
	if (snprintf(include, sizeof(include), "--include=ca-certificates%s%s",
		    o->packages ? "," : "", o->packages ? o->packages : "") >= (int)sizeof(include))
		return err_set(err, -E2BIG, "--packages: too long");
	snprintf(source, sizeof(source), "%s from its packages%s%.180s", release,
		o->packages ? ", with " : "", o->packages ? o->packages : "");
	if (r == 0)
		r = home_images(path, err);
	if (r < 0)
		return r;
	fd = open(path, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_errno(err, -errno, "%s", path);
	building.fd = fd;
	tool.stdout_fd = fd;
	tool.signal_fd = take_signals();
	r = tool_run(&tool, err);
	if (building.show)
		fputs("\r\033[K", stderr);
	if (r == 0 && lseek(fd, 0, SEEK_SET) < 0)
		r = err_errno(err, -errno, "%s", path);
	make.fd = fd;
	make.signal_fd = tool.signal_fd;
	if (r == 0 && geteuid() != 0) {
		char size[32], *again[] = {"import", "--size", size, (char *)(uintptr_t)make.name,
				       "-", NULL};

		snprintf(size, sizeof(size), "%lluK",
			(unsigned long long)((o->size_bytes ? o->size_bytes
							    : ROOTFS_SIZE_DEFAULT_BYTES) /
					     KIB));
		dup2(fd, STDIN_FILENO);
		r = enter_namespace(again, err);
	}
	if (r == 0)
		r = make_image(&make, o, err);
	fd_close(&make.signal_fd);
	return r;
}

// What skopeo makes is a file with a name, so it is made in a folder that goes when all is done,
// or, after a kill, with the next image that is made.
static int fetch(const char *reference, const struct rootfs_writer *writer,
	const struct rootfs_make *make, const struct options *o, struct err *err)
{
	char from[ROOTFS_SOURCE_MAX + 16], to[PATH_MAX + 32];
	const char *argv[] = {"skopeo", "copy", "--quiet", from, to, NULL};
	struct building building = {make->name, "fetching", -1, !o->quiet && isatty(STDERR_FILENO)};
	struct tool tool = {.argv = argv,
		.package = "skopeo",
		.stdin_fd = -1,
		.stdout_fd = -1,
		.signal_fd = make->signal_fd,
		.progress = show_building,
		.opaque = &building};
	int r;

	snprintf(from, sizeof(from), "docker://%s", reference);
	snprintf(to, sizeof(to), "docker-archive:%s/" PULLED, writer->dir);
	r = tool_run(&tool, err);
	if (building.show)
		fputs("\r\033[K", stderr);
	return r;
}

static int pull(const char *reference, char **argv, const struct options *o, struct err *err)
{
	char name[ROOTFS_SOURCE_MAX + 1];
	struct rootfs_make make = {.name = o->name ? o->name : name, .source = reference};
	struct rootfs_writer writer;
	CLEANUP_FD int fd = -1;
	const char *last;
	int r;

	if (strlen(reference) > ROOTFS_SOURCE_MAX)
		return err_set(err, -EINVAL, "'%.40s…' is too long for a reference", reference);
	for (const char *at = reference; *at; at++)
		if ((unsigned char)*at <= ' ' || (unsigned char)*at >= 0x7f)
			return err_set(
				err, -EINVAL, "'%s' is no reference, like NAME:TAG", reference);
	last = strrchr(reference, '/');
	last = last ? last + 1 : reference;
	snprintf(name, sizeof(name), "%.*s", (int)strcspn(last, ":@"), last);
	r = rootfs_check_name(make.name, err);
	if (r == 0 && geteuid() != 0)
		r = enter_namespace(argv, err);
	if (r == 0)
		r = rootfs_begin(&writer, err);
	if (r < 0)
		return r;
	make.signal_fd = take_signals();
	r = fetch(reference, &writer, &make, o, err);
	if (r == 0) {
		make.fd = fd = openat(writer.dir_fd, PULLED, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
		r = fd < 0 ? err_errno(err, -errno, "%s/" PULLED, writer.dir)
			   : make_image(&make, o, err);
	}
	rootfs_end(&writer);
	fd_close(&make.signal_fd);
	return r;
}

// --- Looking ---------------------------------------------------------------------------------

static json_t *describe(const struct rootfs *image)
{
	return json_pack("{s:s, s:I, s:I, s:s, s:I, s:s, s:s, s:O}", "id", image->id, "size_bytes",
		(json_int_t)image->size_bytes, "data_bytes", (json_int_t)image->data_bytes,
		"source", image->source, "created_s", (json_int_t)image->created_s, "root_sha256",
		image->root_sha256, "dir", image->dir, "config", image->config);
}

static int list_one(void *opaque, const struct rootfs *image, const char *names)
{
	json_t *entry = describe(image), *list = json_array();
	char text[1024], *rest = text, *name;

	snprintf(text, sizeof(text), "%s", names);
	while (names[0] && (name = strsep(&rest, ",")))
		json_array_append_new(list, json_string(name + strspn(name, " ")));
	json_object_set_new(entry, "names", list);
	return json_array_append_new(opaque, entry) < 0 ? -ENOMEM : 0;
}

static void tell_broken(void *opaque, const char *dir, const struct err *err)
{
	(void)opaque;
	(void)dir;
	fprintf(stderr, "mayfly image: %s\n", err->msg);
}

static void print_row(const json_t *image)
{
	time_t created = (time_t)json_integer_value(json_object_get(image, "created_s"));
	const json_t *names = json_object_get(image, "names");
	char when[32] = "";
	struct tm tm;

	if (localtime_r(&created, &tm))
		strftime(when, sizeof(when), "%Y-%m-%d %H:%M", &tm);
	for (size_t i = 0; i < MAX(json_array_size(names), (size_t)1); i++) {
		const char *name = json_string_value(json_array_get(names, i));

		printf("%-24s %.12s %7lldM %7lldM %-16s %s\n", name ? name : "-",
			json_string_value(json_object_get(image, "id")),
			json_integer_value(json_object_get(image, "size_bytes")) / (json_int_t)MIB,
			json_integer_value(json_object_get(image, "data_bytes")) / (json_int_t)MIB,
			when, json_string_value(json_object_get(image, "source")));
	}
}

static int list(bool json, struct err *err)
{
	json_t *all = json_array(), *image;
	size_t i;
	int r = rootfs_each(list_one, tell_broken, all, err);

	if (r == 0 && json) {
		json_dumpf(all, stdout, JSON_INDENT(2));
		putchar('\n');
	} else if (r == 0) {
		printf("%-24s %-12s %8s %8s %-16s %s\n", "NAME", "ID", "SIZE", "DATA", "CREATED",
			"FROM");
		json_array_foreach(all, i, image) print_row(image);
	}
	json_decref(all);
	return r;
}

static int inspect(const char *name, struct err *err)
{
	CLEANUP_ROOTFS struct rootfs image = {0};
	int r = rootfs_find(name, &image, err);
	json_t *all;

	if (r < 0)
		return r;
	all = describe(&image);
	json_dumpf(all, stdout, JSON_INDENT(2));
	putchar('\n');
	json_decref(all);
	return 0;
}

static int verify(const char *name, struct err *err)
{
	CLEANUP_ROOTFS struct rootfs image = {0};
	char path[PATH_MAX], sum[SHA256_TEXT_LEN + 1];
	CLEANUP_FD int fd = -1;
	uint64_t data_bytes;
	int r = rootfs_find(name, &image, err);

	if (r < 0)
		return r;
	if (snprintf(path, sizeof(path), "%s/" ROOTFS_DISK, image.dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", image.dir);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return err_errno(err, -errno, "%s", path);
	r = rootfs_checksum(fd, false, sum, &data_bytes, err);
	if (r == 0 && strcmp(sum, image.root_sha256) != 0)
		r = err_set(err, -EBADMSG,
			"%s: its content is not what it was (remove and make it again)", path);
	if (r == 0)
		printf("%s: good\n", name);
	return r;
}

// --- The verb --------------------------------------------------------------------------------

enum { OPT_PACKAGES = 256, OPT_NAME, OPT_MIRROR, OPT_SIZE, OPT_JSON };

static const struct {
	const char *name;
	int min, max; // arguments; max 0: any number
} actions[] = {
	{"build", 1, 1},
	{"import", 2, 2},
	{"pull", 1, 1},
	{"ls", 0, -1},
	{"inspect", 1, 1},
	{"verify", 1, 0},
	{"rm", 1, 0},
};

static int act(
	const char *action, char **args, char **argv, const struct options *o, struct err *err)
{
	int (*each)(const char *, struct err *) = NULL;
	int status = 0;

	if (!strcmp(action, "build"))
		return build(args[0], o, err);
	if (!strcmp(action, "import"))
		return import(args, argv, o, err);
	if (!strcmp(action, "pull"))
		return pull(args[0], argv, o, err);
	if (!strcmp(action, "ls"))
		return list(o->json, err);
	if (!strcmp(action, "inspect"))
		return inspect(args[0], err);
	each = !strcmp(action, "verify") ? verify : rootfs_remove;
	for (; *args; args++) {
		int r = each(*args, err);

		if (r == 0)
			continue;
		status = r;
		if (args[1])
			cli_fail("image", err);
	}
	return status;
}

static bool known(const char *action, int nr_args)
{
	for (size_t i = 0; i < ARRAY_SIZE(actions); i++)
		if (!strcmp(action, actions[i].name))
			return nr_args >= actions[i].min &&
			       (actions[i].max == 0 || nr_args <= MAX(actions[i].max, 0));
	return false;
}

int image_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"packages", required_argument, NULL, OPT_PACKAGES},
		{"name", required_argument, NULL, OPT_NAME},
		{"mirror", required_argument, NULL, OPT_MIRROR},
		{"size", required_argument, NULL, OPT_SIZE},
		{"quiet", no_argument, NULL, 'q'},
		{"json", no_argument, NULL, OPT_JSON},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct options o = {0};
	struct err err = {0};
	char *given[64] = {NULL}; // as they came: getopt sorts argv
	int opt, r;

	for (int i = 1; i < argc && i < (int)ARRAY_SIZE(given); i++)
		given[i - 1] = argv[i];
	optind = 1;
	while ((opt = getopt_long(argc, argv, "qh", options, NULL)) != -1) {
		switch (opt) {
		case OPT_PACKAGES:
			o.packages = optarg;
			break;
		case OPT_NAME:
			o.name = optarg;
			break;
		case OPT_MIRROR:
			o.mirror = optarg;
			break;
		case OPT_SIZE:
			if (parse_size(optarg, &o.size_bytes, &err) < 0) {
				err_wrap(&err, err.code, "--size");
				return cli_bad_option("image", &err);
			}
			break;
		case 'q':
			o.quiet = true;
			break;
		case OPT_JSON:
			o.json = true;
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs("mayfly image --help tells more\n", stderr);
			return EXIT_USAGE;
		}
	}
	if (optind == argc || !known(argv[optind], argc - optind - 1)) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	r = act(argv[optind], argv + optind + 1, given, &o, &err);
	if (r == -EINVAL)
		return cli_bad_option("image", &err);
	return r < 0 ? cli_fail("image", &err) : 0;
}
