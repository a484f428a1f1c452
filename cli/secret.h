// SPDX-License-Identifier: Apache-2.0
// The credentials of machines: $MAYFLY_HOME/secrets/NAME.json, mode 0600. Not in the machine's
// folder, which is the root of its monitor, and not in snapshots. One thread.
#ifndef MAYFLY_CLI_SECRET_H
#define MAYFLY_CLI_SECRET_H

#include "egress/secret.h"

// Those of the machine; none if there is no such file.
int secrets_load(const char *machine, struct secrets *ret, struct err *err);

// The machine is being renamed. None is no error.
int secrets_rename(const char *machine, const char *new_name, struct err *err);

// The machine is being removed.
int secrets_forget(const char *machine, struct err *err);

#endif
