// Asking: one request and its answer, or one prompt answered in several ways, one after the other.
// Knows how a conversation becomes requests; nothing of the fields they are chosen with.

import { Answer } from "./answer.js";
import { ApiError, events } from "./api.js";
import { t } from "./catalogue.js";
import { TokenCutter } from "./tokens.js";

/** `only`: a model's name, or null for all of them, routed. */
export function requestBody({ about, messages, settings, router, only }) {
  const own = { trace: true };
  if (only !== null) own.only = only;
  else if (Object.keys(router).length) own.router = router;
  return {
    model: about.served_models[0],
    messages,
    stream: true,
    stream_options: { include_usage: true },
    ...settings,
    separate_reasoning: false, // what a model thinks is shown as it is written
    trserve: own,
  };
}

/** What the tokens cost: weights met, all tokens by the largest model = 1; null where unknown. */
export function costOf(about, counts) {
  const sizes = Object.fromEntries(about.models.map((model) => [model.name, model.active_parameters]));
  const largest = Math.max(...Object.values(sizes));
  const total = Object.values(counts).reduce((sum, n) => sum + n, 0);
  if (!largest || Object.values(sizes).some((size) => !size)) return null;
  if (!total) return 0;
  return Object.entries(counts).reduce((sum, [name, n]) => sum + n * sizes[name], 0) / (total * largest);
}

/** The model that cost is told in. */
export function largestOf(about) {
  return about.models.reduce((one, other) => (other.active_parameters > one.active_parameters ? other : one)).name;
}

function countsOf(about, tokens) {
  const counts = Object.fromEntries(about.models.map((model) => [model.name, 0]));
  for (const token of tokens) counts[about.models[token.source].name] += 1;
  return counts;
}

function summary(about, run, tokens) {
  const counts = countsOf(about, tokens);
  const others = tokens.length - counts[about.models[0].name];
  return {
    tokens: counts,
    share: tokens.length ? others / tokens.length : 0,
    cost: costOf(about, counts),
    first: run.first,
    time: run.time,
    handoffs: run.usage?.trserve?.handoffs ?? null,
  };
}

function noteOf(error, run, answered) {
  if (error?.name === "AbortError") return t("stopped");
  if (error instanceof ApiError) {
    const key = error.status === 503 || error.status === 429 ? "waitFor" : "failed";
    return t(key, { status: error.status, why: error.message });
  }
  if (error) return answered ? t("brokenOff") : t("noServer", { why: error.message });
  if (run.usage?.trserve?.degraded) return t("degradedAnswer");
  return run.finish === "length" ? t("cutOff") : null;
}

/**
 * Send a request and show its answer as it comes.
 *
 * Resolves to the run: `body`, `id`, `who`, `tokens`, `text`, `usage`, `finish`, `first` and `time`
 * (ms), `summary`, and `error`, which is null where the answer ended by itself.
 */
export async function runOne({ about, body, who, threshold, signal, place, tools }) {
  const answer = new Answer(about.models.map((model) => model.name), who, threshold, tools);
  place.append(answer.element);
  const began = performance.now();
  const run = { body, who, threshold, answer, id: null, usage: null, finish: null, first: null, time: 0, error: null };
  try {
    await read(run, answer, signal, began);
  } catch (error) {
    run.error = error;
  }
  run.time = performance.now() - began;
  run.tokens = answer.tokens;
  run.text = answer.tokens.map((token) => token.text).join("");
  run.summary = summary(about, run, answer.tokens);
  const failed = run.error !== null && run.error.name !== "AbortError";
  answer.end(run.summary, noteOf(run.error, run, answer.tokens.length > 0), failed);
  return run;
}

async function read(run, answer, signal, began) {
  const cutter = new TokenCutter();
  for await (const data of events("v1/chat/completions", { body: run.body, signal })) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code ?? "", chunk.error.message, chunk.error.code);
    run.id = chunk.id;
    if (chunk.usage) run.usage = chunk.usage;
    for (const choice of chunk.choices) {
      run.first ??= performance.now() - began;
      run.finish ??= choice.finish_reason;
      answer.add(cutter.add(choice));
    }
  }
  throw new Error(t("brokenOff"));
}

/** A run as it is saved. */
export function asJson(run) {
  return {
    written_by: run.body.trserve.only ?? "routed",
    response_id: run.id,
    request: run.body,
    threshold: run.threshold,
    text: run.text,
    finish_reason: run.finish,
    usage: run.usage,
    first_token_ms: run.first,
    time_ms: run.time,
    share: run.summary.share,
    cost: run.summary.cost,
    error: run.error ? String(run.error.message) : null,
    tokens: run.tokens.map(({ text, source, score, handoffUs, alone, logprob, tops }) => ({
      text,
      model: run.answer.models[source],
      score,
      handoff_us: handoffUs,
      alone,
      logprob,
      alternatives: tops.map(([token, value]) => ({ token, logprob: value })),
    })),
  };
}
