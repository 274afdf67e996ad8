// The Vercel AI SDK with @ai-sdk/openai-compatible: what its user sees.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { comesTo, metric, model as name, solved, sudoku, sum, url } from "./shared.mjs";

const provider = createOpenAICompatible({
  name: "mercury",
  baseURL: `${url}/v1`,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);
const settings = { model, maxRetries: 0, temperature: 0 };
const digit = z.number().int().min(0).max(9);
const Paint = z.object({ colour: z.enum(["red", "green"]), coats: digit });

test("generateText answers and counts", async () => {
  const said = await generateText({ ...settings, prompt: sudoku });
  assert.equal(said.text, solved);
  assert.equal(said.finishReason, "stop");
  assert.ok(said.usage.inputTokens > 0 && said.usage.outputTokens > 16);
});

test("streamText is the answer in pieces, with its usage", async () => {
  const stream = streamText({ ...settings, prompt: sudoku });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, solved);
  assert.equal(await stream.finishReason, "stop");
  assert.ok((await stream.usage).outputTokens > 16);
});

test("generateObject fits its schema at the first try", async () => {
  const said = await generateObject({ ...settings, prompt: sum, schema: Paint, maxOutputTokens: 64 });
  assert.deepEqual(Paint.parse(said.object), said.object);
});

const records = {
  "z.string": z.record(z.string(), z.boolean()),
  "z.enum": z.record(z.enum(["red", "green"]), digit),
  "z.partialRecord": z.partialRecord(z.enum(["red", "green"]), digit),
  "z.literal": z.record(z.literal("red"), digit),
  "a pattern": z.record(z.string().regex(/^[a-z]{2}$/), digit),
  "a union": z.record(z.union([z.literal("red"), z.string().regex(/^x[0-9]$/)]), digit),
};
for (const [kind, record] of Object.entries(records)) {
  test(`generateObject fits z.record of ${kind}`, async () => {
    const schema = z.object({ record });
    const said = await generateObject({ ...settings, prompt: sum, schema, maxOutputTokens: 64 });
    assert.deepEqual(schema.parse(said.object), said.object);
  });
}

test("a tool takes a z.record", async () => {
  const paint = tool({ inputSchema: z.object({ coats: z.record(z.string(), digit) }) });
  const said = await generateText({ ...settings, prompt: sum, maxOutputTokens: 96, tools: { paint }, toolChoice: "required" });
  assert.ok(said.toolCalls.length >= 1 && said.toolCalls.every((call) => !call.invalid));
});

test("generateObject chooses one of an enumeration", async () => {
  const values = ["red", "green"];
  const said = await generateObject({ ...settings, prompt: sum, output: "enum", enum: values, maxOutputTokens: 32 });
  assert.ok(values.includes(said.object));
});

test("streamObject grows into the whole object", async () => {
  const stream = streamObject({ ...settings, prompt: sum, schema: Paint, maxOutputTokens: 64 });
  for await (const partial of stream.partialObjectStream) assert.equal(typeof partial, "object");
  assert.ok(Paint.safeParse(await stream.object).success);
});

test("a tool loop: the tool runs, its result goes back, the next step answers", async () => {
  const sums = [];
  const add = tool({
    description: "Add two digits",
    inputSchema: z.object({ a: digit, b: digit }),
    execute: async ({ a, b }) => sums.push(a + b) && a + b,
  });
  const said = await generateText({
    ...settings,
    prompt: sum,
    maxOutputTokens: 96,
    tools: { add },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.equal(said.steps.length, 2);
  assert.equal(said.steps[0].finishReason, "tool-calls");
  const told = said.steps[0].toolResults.map((r) => r.output);
  assert.ok(told.length >= 1);
  assert.deepEqual(told, sums);
  assert.equal(said.steps[1].toolCalls.length, 0);
});

test("streamed tool calls arrive whole", async () => {
  const add = tool({ inputSchema: z.object({ a: digit, b: digit }) });
  const stream = streamText({ ...settings, prompt: sum, maxOutputTokens: 96, tools: { add }, toolChoice: "required" });
  const calls = await stream.toolCalls;
  assert.ok(calls.length >= 1 && calls.every((c) => c.toolName === "add" && !c.invalid));
  assert.equal(await stream.finishReason, "tool-calls");
});

test("aborting frees the slot", async () => {
  const before = await metric("mercury_cancelled_total");
  const leave = new AbortController();
  const stream = streamText({
    ...settings,
    model: provider.completionModel(name),
    prompt: "import os\n",
    maxOutputTokens: 400,
    abortSignal: leave.signal,
    providerOptions: { mercury: { logitBias: { 3: -100 } } },
  });
  const parts = [];
  for await (const part of stream.fullStream) {
    parts.push(part.type);
    if (part.type === "text-delta") leave.abort();
  }
  assert.equal(parts.at(-1), "abort");
  assert.ok(await comesTo("mercury_cancelled_total", before + 1));
  assert.ok(await comesTo("mercury_running", 0));
});

test("an error is an error of the call", async () => {
  const ask = generateText({ ...settings, model: provider("gpt-9"), prompt: sum });
  await assert.rejects(ask, (error) => APICallError.isInstance(error) && error.statusCode === 404);
});
