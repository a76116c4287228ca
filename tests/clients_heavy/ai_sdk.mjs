// Vercel's AI SDK, whose schemas are strict, against an endpoint: whole, streamed, raw, errors.
// Usage: node ai_sdk.mjs BASE_URL
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, jsonSchema, streamText, tool } from 'ai';

const provider = createOpenAICompatible({
  name: 'trserve', baseURL: process.argv[2], apiKey: 'any', includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = {
  model: provider('trserve'),
  prompt: 'What is 125 - 54 + 25?',
  maxOutputTokens: 80,
  temperature: 0,
  maxRetries: 0,
};

const whole = await generateText(asked);
assert.ok(whole.text);
assert.ok(whole.usage.outputTokens > 0);

const result = streamText({ ...asked, includeRawChunks: true });
let streamed = '';
let raw = 0;
for await (const part of result.fullStream) {
  assert.notEqual(part.type, 'error', JSON.stringify(part));
  if (part.type === 'text-delta') streamed += part.text;
  if (part.type === 'raw') raw += 1;
}
assert.equal(streamed, whole.text);
assert.equal((await result.usage).outputTokens, whole.usage.outputTokens);
assert.ok(raw > 1);

// What the pair, which knows no tools and no forms, comes to an end with by itself.
const digits = { type: 'integer', minimum: 0, maximum: 999 };
const schema = jsonSchema({
  type: 'object',
  properties: { a: digits, b: digits },
  required: ['a', 'b'],
  additionalProperties: false,
});
const { object } = await generateObject({ ...asked, maxOutputTokens: 200, schema });
assert.deepEqual(Object.keys(object), ['a', 'b']);

const called = await generateText({
  ...asked,
  maxOutputTokens: 200,
  tools: { add: tool({ description: 'Add two numbers.', inputSchema: schema }) },
  toolChoice: { type: 'tool', toolName: 'add' },
});
assert.equal(called.toolCalls[0].toolName, 'add');
assert.equal(typeof called.toolCalls[0].input.a, 'number');

await assert.rejects(generateText({ ...asked, temperature: -1 }), /temperature/);
console.log(`${whole.usage.outputTokens} tokens, streamed as whole; an object; a call`);
