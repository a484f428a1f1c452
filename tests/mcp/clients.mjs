// SPDX-License-Identifier: Apache-2.0
// Several clients of MCP, each doing the same task in a machine: files, an edit, a build, a test, a
// snapshot, a mishap, and back. Called by clients.sh, which says how in $MAYFLY, $MCP_URL and
// $MCP_TOKEN.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFileSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const { MAYFLY, MCP_URL, MCP_TOKEN } = process.env;
const stdio = { command: MAYFLY, args: ["mcp", "box"], env: process.env };
const authorization = `Bearer ${MCP_TOKEN}`;
const http = { requestInit: { headers: { authorization } } };
const info = { name: "clients", version: "1" };
const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const version = (name) =>
	JSON.parse(readFileSync(here(`node_modules/${name}/package.json`))).version;

// tool(name, arguments) calls one, and returns its structured result.
async function task(tool, tag) {
	const dir = `/work-${tag}`;
	await tool("write_file", { path: `${dir}/greet.in`, content: "say hello\n" });
	await tool("write_file", { path: `${dir}/build`, mode: "0755",
		content: `#!/bin/sh\nsed 's/^say /echo /' ${dir}/greet.in >${dir}/greet\n` });
	await tool("edit_file", { path: `${dir}/greet.in`, old_text: "hello", new_text: "world" });
	assert.equal((await tool("exec", { argv: [`${dir}/build`] })).exit_code, 0);
	const test = await tool("exec", { argv: ["sh", `${dir}/greet`] });
	assert.deepEqual([test.exit_code, test.stdout], [0, "world\n"]);
	assert.equal((await tool("snapshot", { tag })).tag, tag);
	await tool("remove", { path: dir, recursive: true });
	assert.equal((await tool("exec", { argv: ["ls", dir] })).exit_code !== 0, true);
	await tool("restore", { tag });
	assert.equal((await tool("read_file", { path: `${dir}/greet.in` })).content, "say world\n");
}

async function withClient(client, transport, tag) {
	await client.connect(transport);
	const { tools } = await client.listTools();
	assert.ok(tools.some((tool) => tool.name === "exec"));
	const { resources } = await client.listResources();
	assert.ok(resources.some((resource) => resource.uri === "mayfly://console"));
	await task(async (name, args) => {
		const result = await client.callTool({ name, arguments: args });
		assert.ok(!result.isError, JSON.stringify(result));
		return result.structuredContent;
	}, tag);
	await client.close();
}

// A program that makes one call each time.
function withProgram(argsOf) {
	return (name, args) => {
		const [program, ...rest] = argsOf(name, args);
		const out = execFileSync(process.execPath, [here(program), ...rest],
			{ encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] });
		const result = JSON.parse(out);
		assert.ok(!result.isError, out);
		return result.structuredContent ?? result;
	};
}

const clients = {
	async "@modelcontextprotocol/sdk, stdio"() {
		const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
		const { StdioClientTransport } = await import("@modelcontextprotocol/sdk/client/stdio.js");
		await withClient(new Client(info), new StdioClientTransport(stdio), "sdk-stdio");
	},
	async "@modelcontextprotocol/sdk, HTTP"() {
		const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
		const { StreamableHTTPClientTransport } =
			await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
		await withClient(new Client(info),
			new StreamableHTTPClientTransport(new URL(MCP_URL), http), "sdk-http");
	},
	async "@modelcontextprotocol/client, 2026-07-28 over HTTP"() {
		const { Client, StreamableHTTPClientTransport } =
			await import("@modelcontextprotocol/client");
		await withClient(
			new Client(info, { versionNegotiation: { mode: { pin: "2026-07-28" } } }),
			new StreamableHTTPClientTransport(new URL(MCP_URL), http), "client-http");
	},
	async "@modelcontextprotocol/client, 2026-07-28 over stdio"() {
		const { Client } = await import("@modelcontextprotocol/client");
		const { StdioClientTransport } = await import("@modelcontextprotocol/client/stdio");
		await withClient(
			new Client(info, { versionNegotiation: { mode: { pin: "2026-07-28" } } }),
			new StdioClientTransport(stdio), "client-stdio");
	},
	// Its user sees that the owner has to decide, and the call is made again when the owner has.
	async "@modelcontextprotocol/client, the owner and changes"() {
		const { Client } = await import("@modelcontextprotocol/client");
		const { StdioClientTransport } = await import("@modelcontextprotocol/client/stdio");
		const client = new Client(info, { versionNegotiation: { mode: { pin: "2026-07-28" } },
			capabilities: { elicitation: {} } });
		let asked = "";
		client.setRequestHandler("elicitation/create", async (request) => {
			asked = request.params.message;
			const [wanted] = JSON.parse(execFileSync(MAYFLY, ["approvals", "--json", "box"]));
			execFileSync(MAYFLY, ["approvals", "box", "allow", wanted.id], { stdio: "ignore" });
			return { action: "accept", content: {} };
		});
		await client.connect(new StdioClientTransport(stdio));
		const tool = async (name, args) =>
			(await client.callTool({ name, arguments: args })).structuredContent;
		const set = await tool("set_network", { reach: ["a.example"] });
		assert.deepEqual([set.state, set.reach], ["set", ["a.example"]]);
		assert.match(asked, /mayfly approvals box/);
		let told = null;
		client.setNotificationHandler("notifications/resources/updated", (notice) => {
			told = notice.params.uri;
		});
		const watched = { path: "/tmp/watched", content: "again\n" };
		await tool("write_file", watched);
		await client.listen({ resourceSubscriptions: ["mayfly://files/tmp/watched"] });
		for (let i = 0; !told; i++) {
			assert.ok(i < 1000);
			await tool("write_file", watched);
		}
		assert.equal(told, "mayfly://files/tmp/watched");
		await client.close();
	},
	async "@modelcontextprotocol/inspector-cli, HTTP"() {
		// It looks for its package.json a folder too high, where it is in its own repository.
		const scope = "node_modules/@modelcontextprotocol";
		copyFileSync(here(`${scope}/inspector-cli/package.json`), here(`${scope}/package.json`));
		await task(withProgram((name, args) => [
			"node_modules/@modelcontextprotocol/inspector-cli/build/cli.js", "--cli", MCP_URL,
			"--transport", "http", "--header", `Authorization: ${authorization}`,
			"--method", "tools/call", "--tool-name", name,
			...Object.entries(args).flatMap(([key, value]) => ["--tool-arg",
				`${key}=${typeof value === "string" ? value : JSON.stringify(value)}`]),
		]), "inspector");
	},
	async "mcporter, stdio"() {
		const config = here("mcporter.json");
		writeFileSync(config, JSON.stringify({ mcpServers: { box: stdio } }));
		await task(withProgram((name, args) => ["node_modules/mcporter/dist/cli.js", "call",
			`box.${name}`, "--config", config, "--output", "json", "--args", JSON.stringify(args),
		]), "mcporter");
	},
};

let failed = false;
for (const [name, run] of Object.entries(clients)) {
	const what = `${name} (${version(name.split(",")[0])})`;
	const start = Date.now();
	try {
		await run();
		console.log(`ok   ${what}: the whole task, ${((Date.now() - start) / 1000).toFixed(1)} s`);
	} catch (error) {
		console.log(`FAIL ${what}: ${error.stack}\n${error.stderr ?? ""}`);
		failed = true;
	}
}
process.exit(failed ? 1 : 0);
