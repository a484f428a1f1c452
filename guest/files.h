// SPDX-License-Identifier: Apache-2.0
// The agent's other half: the same program as a short-lived process that reads and writes files as
// some user, blocks on the disk as it likes, and is ended like any command.
#ifndef MAYFLY_GUEST_FILES_H
#define MAYFLY_GUEST_FILES_H

#define FILES_NAME "mayfly-files" // argv[0] of that process

int files_main(int argc, char **argv);

#endif
