// SPDX-License-Identifier: Apache-2.0
// What a machine and its devices have counted, and its balloon, for the control socket. Loop
// thread.
#ifndef MAYFLY_VM_STATS_H
#define MAYFLY_VM_STATS_H

#include <jansson.h>

#include "vmm/vm.h"

// An object of objects of numbers: "exits", and each device. The caller's. The guest's own figures
// are as old as they say; they are asked for anew each time.
json_t *vm_stats_json(struct vm *vm);

// How much memory the guest is to give up, in its own time. -ERANGE for all that it has.
int vm_set_balloon(struct vm *vm, json_int_t bytes, struct err *err);

#endif
