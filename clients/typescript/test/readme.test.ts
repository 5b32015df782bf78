/** Each program in README.md runs as printed, in order, against the live service. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { test } from "node:test";
import { promisify } from "node:util";

const HERE = new URL("../../", import.meta.url); // the package; this file runs from build/test

test("the programs in README.md run", async () => {
  const page = await readFile(new URL("README.md", HERE), "utf8");
  const programs = [...page.matchAll(/^```js\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?/gms)];
  assert.ok(programs.length >= 4);
  for (const [number, [, code, output]] of programs.entries()) {
    // Inside the package, so that the package's name resolves as it does for users.
    const path = new URL(`build/readme-${number}.mjs`, HERE);
    await writeFile(path, code!);
    const { stdout, stderr } = await promisify(execFile)(process.execPath, [path.pathname], { timeout: 60_000 });
    assert.equal(stderr, "");
    if (output !== undefined) assert.equal(stdout, output);
  }
});
