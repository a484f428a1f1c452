// SPDX-License-Identifier: Apache-2.0
// The jobs of a machine; see the header. One thread.
#include "cli/job_list.h"

#include <errno.h>
#include <string.h>

#include "cli/agent_client.h"
#include "cli/exec_options.h"
#include "vmm/base/fd.h"

static bool is_list(const json_t *jobs)
{
	const json_t *job;
	size_t i;

	json_array_foreach(jobs, i, job)
	{
		if (!json_is_string(json_object_get(job, "job")))
			return false;
	}
	return json_is_array(jobs);
}

int job_list_get(const struct running *m, json_t **ret, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FD int fd = running_connect(m, err);
	int rc = fd < 0 ? fd : agent_jobs(fd, -1, now_ns() + EXEC_ANSWER_NS, &text, err);
	json_t *reply, *jobs;

	if (rc < 0)
		return rc;
	reply = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	jobs = json_object_get(reply, "jobs");
	if (is_list(jobs))
		*ret = json_incref(jobs);
	else
		rc = err_set(err, -EPROTO, "the guest's answer makes no sense");
	json_decref(reply);
	return rc;
}

json_t *job_list_find(const json_t *jobs, const char *name)
{
	json_t *job;
	size_t i;

	json_array_foreach(jobs, i, job)
	{
		if (!strcmp(json_string_value(json_object_get(job, "job")), name))
			return job;
	}
	return NULL;
}

uint64_t job_number(const json_t *object, const char *key)
{
	json_int_t n = json_integer_value(json_object_get(object, key));

	return n > 0 ? (uint64_t)n : 0;
}
