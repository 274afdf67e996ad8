// openai (Node): what its user sees.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { comesTo, endless, metric, model, solved, sudoku, sum, url, user } from "./shared.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const Paint = z.object({ colour: z.enum(["red", "green"]), coats: z.number().int().min(0).max(9) });
const digit = { type: "integer", minimum: 0, maximum: 9 };
const parameters = {
  type: "object",
  properties: { a: digit, b: digit },
  required: ["a", "b"],
  additionalProperties: false,
};

test("a chat answers and counts", async () => {
  const said = await client.chat.completions.create({ model, messages: user(sudoku), temperature: 0 });
  assert.equal(said.choices[0].message.content, solved);
  assert.equal(said.choices[0].finish_reason, "stop");
  assert.equal(said.usage.total_tokens, said.usage.prompt_tokens + said.usage.completion_tokens);
});

test("a stream is the answer in pieces, with its usage last", async () => {
  const stream = await client.chat.completions.create({
    model,
    messages: user(sudoku),
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks.map((c) => c.choices[0]?.delta.content ?? "").join(""), solved);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.ok(chunks.at(-1).usage.completion_tokens > 16);
  assert.ok(chunks.slice(0, -1).every((c) => !c.usage));
});

test("parse gives the type that was asked for", async () => {
  const said = await client.chat.completions.parse({
    model,
    messages: user(sum),
    max_tokens: 64,
    response_format: zodResponseFormat(Paint, "paint"),
  });
  assert.deepEqual(Paint.parse(said.choices[0].message.parsed), said.choices[0].message.parsed);
});

test("the tool runner runs a function and goes on with its result", async () => {
  const sums = [];
  const add = ({ a, b }) => {
    sums.push(a + b);
    return `${a + b}`;
  };
  const runner = client.chat.completions.runTools(
    {
      model,
      messages: user(sum),
      max_tokens: 96,
      tool_choice: { type: "function", function: { name: "add" } },
      tools: [{ type: "function", function: { name: "add", function: add, parse: JSON.parse, parameters } }],
    },
    { maxChatCompletions: 3 },
  );
  await runner.done();
  const told = runner.messages.filter((m) => m.role === "tool");
  assert.equal(sums.length, told.length);
  assert.ok(sums.length >= 1 && sums.every((s) => Number.isInteger(s) && s >= 0 && s <= 18));
  assert.deepEqual(told.map((m) => m.content), sums.map(String));
});

test("tool deltas add up to calls", async () => {
  const stream = client.chat.completions.stream({
    model,
    messages: user(sum),
    max_tokens: 96,
    tool_choice: "required",
    tools: [{ type: "function", function: { name: "add", parameters } }],
  });
  const said = await stream.finalChatCompletion();
  assert.equal(said.choices[0].finish_reason, "tool_calls");
  for (const call of said.choices[0].message.tool_calls) {
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["a", "b"]);
  }
});

test("leaving in the middle frees the slot", async () => {
  const before = await metric("mercury_cancelled_total");
  const stream = await client.completions.create({
    model,
    prompt: "import os\n",
    max_tokens: 400,
    stream: true,
    ...endless,
  });
  for await (const _ of stream) break;
  assert.ok(await comesTo("mercury_cancelled_total", before + 1));
  assert.ok(await comesTo("mercury_running", 0));
});

test("a burst is refused with 429, and retries get through", async () => {
  const ask = (c, max_tokens) => c.completions.create({ model, prompt: "import os\n", max_tokens, ...endless });
  const hasty = await Promise.allSettled(Array.from({ length: 12 }, () => ask(client, 256)));
  const refused = hasty.filter((r) => r.status === "rejected").map((r) => r.reason);
  assert.ok(refused.length > 0 && refused.every((e) => e instanceof OpenAI.RateLimitError));
  const patient = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 50 });
  const answers = await Promise.all(Array.from({ length: 6 }, () => ask(patient, 64)));
  assert.deepEqual(answers.map((a) => a.usage.completion_tokens), Array(6).fill(64));
});

test("what cannot be done is said", async () => {
  const ask = { model, messages: user(sum) };
  await assert.rejects(client.chat.completions.create({ ...ask, model: "gpt-9" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: 3.5 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});
