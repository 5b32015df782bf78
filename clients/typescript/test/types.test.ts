/** Code that the compiler must accept or refuse; `npm test` compiles this file. */

import { test } from "node:test";

import type { BatchHandle, Client, components, operations } from "../src/index.js";

type Schemas = components["schemas"];
type Body<Name extends keyof operations> = operations[Name] extends {
  requestBody?: { content: { "application/json": infer Json } };
}
  ? Json
  : never;

export const valid: Body<"ack_items">[] = [
  { items: [] },
  { items: ["1:0:0"] },
  { groups: [{ batch: 1, group: 0, bits: "/w==" }] },
  { items: ["1:0:0"], groups: [] },
];
export const invalid: Body<"ack_items">[] = [
  // @ts-expect-error a misspelt field
  { itmes: [] },
  // @ts-expect-error neither items nor groups
  {},
  // @ts-expect-error an id is a text
  { items: [1] },
  // @ts-expect-error acks have no reason
  { items: [], reason: "why" },
];
export const failures: Schemas["Failures"][] = [
  { items: ["1:0:0"], reason: "why" },
  { items: ["1:0:0"], reason: null },
  { groups: [] },
  // @ts-expect-error a misspelt field
  { itmes: [], reason: "why" },
];
export const opened: Schemas["OpenBody"][] = [
  {},
  { key: "k", labels: { team: "search" }, items: 5 },
  // @ts-expect-error the contract has snake_case
  { groupSize: 64 },
];
export const redelivered: Schemas["Redelivery"][] = [
  {},
  { position: 1 },
  { event: "e" },
  // @ts-expect-error a position is a number
  { position: "1" },
];

export function narrowed(problem: Schemas["Problem"]): number | string | undefined {
  if (problem.code === "position_trimmed") return problem.trimmed;
  if (problem.code === "version_conflict") return problem.version;
  if (problem.code === "invalid_request") return problem.errors[0]?.place;
  // @ts-expect-error other problems have no such field
  return problem.trimmed;
}

export async function misused(client: Client, batch: BatchHandle): Promise<void> {
  // @ts-expect-error the method takes ids, not a body
  await client.ack({ itmes: [] });
  // @ts-expect-error a misspelt option
  await client.open({ group_size: 64 });
  // @ts-expect-error a count is a number
  await batch.extend("5");
  const { groupSize, createdAt }: { groupSize: number; createdAt: string } = await batch.refresh();
  void [groupSize, createdAt];
}

test("the types above compile", () => undefined);
