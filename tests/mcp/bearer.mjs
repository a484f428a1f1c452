// SPDX-License-Identifier: Apache-2.0
// For the conformance suite, which knows no tokens: puts $MCP_TOKEN into every request that it makes,
// with fetch(), undici's request() or http.request(). Loaded by node --import.
import http from "node:http";
import { createRequire, syncBuiltinESMExports } from "node:module";
import { realpathSync } from "node:fs";

const authorization = `Bearer ${process.env.MCP_TOKEN}`;

const fetch = globalThis.fetch;
globalThis.fetch = (url, init = {}) => {
	const headers = new Headers(init.headers);
	if (!headers.has("authorization"))
		headers.set("authorization", authorization);
	return fetch(url, { ...init, headers });
};

const undici = createRequire(realpathSync(process.argv[1]))("undici");
const undiciRequest = undici.request;
undici.request = (url, init = {}) =>
	undiciRequest(url, { ...init, headers: { authorization, ...init.headers } });

const httpRequest = http.request;
http.request = (...args) =>
	httpRequest(...args.map((arg) =>
		arg && typeof arg === "object" && !(arg instanceof URL)
			? { ...arg, headers: { authorization, ...arg.headers } }
			: arg));
syncBuiltinESMExports();
