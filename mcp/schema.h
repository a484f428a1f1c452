// SPDX-License-Identifier: Apache-2.0
// The part of JSON Schema 2020-12 that our tools' schemas use: type, enum, properties, required,
// additionalProperties, items, min/maxItems, min/maxLength, minimum, maximum. Pure; any thread.
#ifndef MAYFLY_MCP_SCHEMA_H
#define MAYFLY_MCP_SCHEMA_H

#include <jansson.h>

#include "vmm/base/err.h"

// Whether value is what schema, one of ours, describes: 0, or -EINVAL with the path to what is not
// and what it should be.
int schema_check(const json_t *schema, const json_t *value, struct err *err);

// Whether schema uses nothing that schema_check() does not know, and each object in it says which
// members it may have. For tests.
int schema_known(const json_t *schema, struct err *err);

#endif
