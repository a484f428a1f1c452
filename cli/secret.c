// SPDX-License-Identifier: Apache-2.0
// mayfly secret: credentials that the proxy of a machine puts into its requests. One thread.
#include "cli/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/egress_proc.h"
#include "cli/home.h"
#include "cli/life.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

static const char help[] =
	"Usage: mayfly secret add --host HOST [--header NAME] --from-env VAR|--from-file FILE\n"
	"                  MACHINE SECRET\n"
	"       mayfly secret ls [--json] MACHINE\n"
	"       mayfly secret rm MACHINE SECRET\n"
	"\n"
	"Credentials that a machine uses and never has: its programs ask for http://HOST through\n"
	"the machine's proxy (mayfly net), which sends the request to https://HOST with the "
	"header\n"
	"set, once it has verified the server, and takes the value out of what comes back. HOST "
	"has\n"
	"to be on the machine's list. Values are kept in $MAYFLY_HOME/secrets, for the owner "
	"alone;\n"
	"neither snapshots nor forks have them. A proxy that runs is started anew: open "
	"connections\n"
	"end.\n"
	"\n"
	"      --host HOST       where it goes, and nowhere else\n"
	"      --header NAME     the header that it is the value of (default Authorization)\n"
	"      --from-env VAR    the value is that of this variable\n"
	"      --from-file FILE  or what is in this file, without the end of its line\n";

// --- The files -------------------------------------------------------------------------------

static int path_of(const char *machine, char ret[PATH_MAX], struct err *err)
{
	char dir[PATH_MAX];
	int r = home_secrets(dir, err);

	if (r == 0 && snprintf(ret, PATH_MAX, "%s/%s.json", dir, machine) >= PATH_MAX)
		r = err_errno(err, -ENAMETOOLONG, "%s", dir);
	return r;
}

int secrets_load(const char *machine, struct secrets *ret, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	char path[PATH_MAX];
	struct err why = {0};
	size_t len = 0;
	int r = path_of(machine, path, err);

	if (r < 0)
		return r;
	r = fd_read_file(path, SECRETS_FILE_BYTES, &text, &len, &why);
	if (r == -ENOENT) {
		ret->nr = 0;
		return 0;
	}
	if (r < 0)
		return err_set(err, r, "%s", why.msg);
	r = secrets_parse(text, len, ret, err);
	explicit_bzero(text, len);
	return r < 0 ? err_wrap(err, r, "%s", path) : 0;
}

int secrets_forget(const char *machine, struct err *err)
{
	char path[PATH_MAX];
	int r = path_of(machine, path, err);

	if (r == 0 && unlink(path) < 0 && errno != ENOENT)
		r = err_errno(err, -errno, "%s", path);
	return r;
}

int secrets_rename(const char *machine, const char *new_name, struct err *err)
{
	char path[PATH_MAX], fresh[PATH_MAX];
	int r = path_of(machine, path, err);

	if (r == 0)
		r = path_of(new_name, fresh, err);
	if (r == 0 && rename(path, fresh) < 0 && errno != ENOENT)
		r = err_errno(err, -errno, "%s", path);
	return r;
}

static int save(const char *machine, const struct secrets *secrets, struct err *err)
{
	CLEANUP_FREE char *text = secrets_print(secrets);
	char path[PATH_MAX], fresh[PATH_MAX + 8];
	CLEANUP_FD int fd = -1;
	int r = text ? path_of(machine, path, err) : err_errno(err, -ENOMEM, "secret");

	if (r < 0)
		return r;
	ASSERT(text);
	snprintf(fresh, sizeof(fresh), "%s.new", path);
	unlink(fresh);
	fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	r = fd < 0 ? -errno : fd_write_all(fd, text, strlen(text));
	if (r == 0 && (fsync(fd) < 0 || rename(fresh, path) < 0))
		r = -errno;
	explicit_bzero(text, strlen(text));
	if (r < 0)
		unlink(fresh);
	return r < 0 ? err_errno(err, r, "%s", path) : 0;
}

// --- The verbs -------------------------------------------------------------------------------

struct what {
	const char *machine, *name;
	const char *host, *header, *from_env, *from_file;
	bool json;
};

static int read_value(const struct what *w, char **ret, struct err *err)
{
	const char *value;
	size_t len;
	int r;

	if (w->from_env) {
		value = getenv(w->from_env);
		*ret = value ? strdup(value) : NULL;
		return *ret ? 0
			    : err_set(err, -EINVAL, "--from-env: there is no variable '%s'",
				      w->from_env);
	}
	r = fd_read_file(w->from_file, SECRET_VALUE_BYTES, ret, &len, err);
	if (r < 0)
		return r;
	if (strlen(*ret) != len)
		return err_set(err, -EINVAL, "%s: contains a NUL byte", w->from_file);
	(*ret)[strcspn(*ret, "\r\n")] = '\0';
	return 0;
}

static int find(const struct secrets *secrets, const char *name)
{
	for (unsigned int i = 0; i < secrets->nr; i++)
		if (!strcmp(secrets->all[i].name, name))
			return (int)i;
	return -1;
}

static int add(const struct what *w, struct secrets *secrets, struct err *err)
{
	CLEANUP_FREE char *value = NULL;
	int i = find(secrets, w->name), r = read_value(w, &value, err);

	if (r == 0 && i < 0 && secrets->nr == SECRETS_MAX)
		r = err_set(err, -E2BIG, "more than %d credentials", SECRETS_MAX);
	if (r == 0)
		r = secret_set(&secrets->all[i < 0 ? (int)secrets->nr : i], w->name, w->host,
			w->header, value, err);
	if (r == 0 && i < 0)
		secrets->nr++;
	if (value)
		explicit_bzero(value, strlen(value));
	return r;
}

static int take_out(const struct what *w, struct secrets *secrets, struct err *err)
{
	int i = find(secrets, w->name);

	if (i < 0)
		return err_set(err, -ENOENT, "'%s' has no credential '%s' (mayfly secret ls %s)",
			w->machine, w->name, w->machine);
	memmove(&secrets->all[i], &secrets->all[i + 1],
		sizeof(secrets->all[0]) * (secrets->nr - (unsigned int)i - 1));
	secrets->nr--;
	return 0;
}

static void list(const struct what *w, const struct secrets *secrets)
{
	json_t *all = json_array();

	if (!w->json)
		printf("%-20s %-40s %s\n", "NAME", "HOST", "HEADER");
	for (unsigned int i = 0; i < secrets->nr; i++) {
		const struct secret *s = &secrets->all[i];

		json_array_append_new(all, json_pack("{s:s, s:s, s:s}", "name", s->name, "host",
						   s->host.name, "header", s->header));
		if (!w->json)
			printf("%-20s %-40s %s\n", s->name, s->host.name, s->header);
	}
	if (w->json) {
		json_dumpf(all, stdout, JSON_INDENT(2));
		putchar('\n');
	}
	json_decref(all);
}

static int warn_of_list(
	const struct what *w, const char *host_text, const char *dir, struct err *err)
{
	static struct config config; // it is large
	struct allow_list reach;
	struct allow_host host;
	char ini[PATH_MAX];
	int r;

	if (snprintf(ini, sizeof(ini), "%s/vm.ini", dir) >= (int)sizeof(ini))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	r = config_read(ini, &config, err);
	if (r == 0)
		r = allow_host_parse(host_text, strlen(host_text), &host, err);
	if (r < 0)
		return r;
	config_reach(&config, &reach);
	if (!allow_admits(&reach, &host, 443, NULL) && !allow_has_method(&reach, &host, 443))
		fprintf(stderr,
			"mayfly secret: %s:443 is not what '%s' may reach now: mayfly net %s allow "
			"%s, allowlist\n",
			host.name, w->machine, w->machine, host.name);
	return 0;
}

static int run(const char *verb, const struct what *w, struct err *err)
{
	static struct secrets secrets;
	CLEANUP_FD int lock_fd = -1;
	char dir[PATH_MAX];
	int r = home_find(w->machine, dir, err);

	if (r == 0) {
		lock_fd = life_lock(dir, err);
		r = MIN(lock_fd, 0);
	}
	if (r == 0)
		r = secrets_load(w->machine, &secrets, err);
	if (r < 0)
		return r;
	if (!strcmp(verb, "ls")) {
		list(w, &secrets);
		return 0;
	}
	r = !strcmp(verb, "add") ? add(w, &secrets, err) : take_out(w, &secrets, err);
	if (r == 0)
		r = save(w->machine, &secrets, err);
	if (r == 0)
		r = egress_running(dir, err);
	// It reads them when it starts, and no file later.
	if (r == 1) {
		r = egress_end(dir, err);
		if (r == 0)
			r = egress_start(dir, err);
	}
	if (r == 0 && w->host)
		r = warn_of_list(w, w->host, dir, err);
	return r;
}

int secret_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"host", required_argument, NULL, 'H'},
		{"header", required_argument, NULL, 'n'},
		{"from-env", required_argument, NULL, 'e'},
		{"from-file", required_argument, NULL, 'f'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct what w = {.header = "Authorization"};
	struct err err = {0};
	const char *verb;
	bool adds, good;
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (opt) {
		case 'H':
			w.host = optarg;
			break;
		case 'n':
			w.header = optarg;
			break;
		case 'e':
			w.from_env = optarg;
			break;
		case 'f':
			w.from_file = optarg;
			break;
		case 'j':
			w.json = true;
			break;
		default:
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	verb = optind < argc ? argv[optind] : "";
	adds = !strcmp(verb, "add");
	good = argc - optind == (!strcmp(verb, "ls") ? 2 : 3) &&
	       (adds || !strcmp(verb, "ls") || !strcmp(verb, "rm")) && adds == (w.host != NULL) &&
	       adds == ((w.from_env != NULL) != (w.from_file != NULL));
	if (!good) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	w.machine = argv[optind + 1];
	w.name = argv[optind + 2];
	return run(verb, &w, &err) < 0 ? cli_bad_option("secret", &err) : 0;
}
