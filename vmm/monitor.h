// SPDX-License-Identifier: Apache-2.0
// The monitor process, `mayfly vmm`: one machine from its folder's vm.ini until its end.
#ifndef MAYFLY_MONITOR_H
#define MAYFLY_MONITOR_H

// The arguments after "vmm". Returns the exit status: 0 if the guest ended by itself or was told
// to, 125 if the monitor failed, 2 for wrong usage.
int monitor_main(int argc, char **argv);

// What it reports on --status-fd: JSON objects, one a line.
//   {"event":"error","message":TEXT}        it failed; nothing follows
//   {"event":"running",…}                   the vCPUs have been started
//   {"event":"where"}                       SIGUSR1 has been answered, on stderr
//   {"event":"ended","reason":"reset"|"stopped",…}  with the counts of monitor.c

#endif
