// Vercel's AI SDK, whose schemas are strict, against an endpoint: whole, streamed, raw, errors.
// Usage: node ai_sdk.mjs BASE_URL
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';

const provider = createOpenAICompatible({
  name: 'trserve', baseURL: process.argv[2], apiKey: 'any', includeUsage: true,
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

await assert.rejects(generateText({ ...asked, temperature: -1 }), /temperature/);
console.log(`${whole.usage.outputTokens} tokens, ${raw} raw chunks, streamed as whole`);
