// One answer on the page: its tokens, their strip and what is known of it as a whole.
//
// Tokens are appended once in each frame of the screen and never touched again, so that an answer
// costs what its new tokens cost. Knows no requests.

import { number, percent, short, t } from "./catalogue.js";
import { make, terms } from "./dom.js";
import { Strip } from "./strip.js";

const MOST_PER_FRAME = 300;
const STRIP_EVERY_MS = 120;
const SAY_EVERY_MS = 3000;
const SENTENCE_END = /[.!?。\n](?=\s|$)/g;

const growing = new Set();
let frame = 0;

function grow() {
  frame = 0;
  for (const answer of growing) answer.grow();
  if (growing.size) frame = requestAnimationFrame(grow);
}

export class Answer {
  /**
   * @param who what the answer is called.
   * @param threshold `{name, value}` of the router's first parameter, or null.
   * @param tools `choose(answer, index)`, `grown()`, `say(text)`.
   */
  constructor(models, who, threshold, tools) {
    this.models = models;
    this.who = who;
    this.threshold = threshold;
    this.tools = tools;
    this.tokens = [];
    this.shown = 0;
    this.now = null;
    this.ended = false;
    this.unsaid = "";
    this.saidAt = performance.now();
    this.stripAt = 0;
    this.text = make("div", { className: "answer still", tabIndex: 0, role: "group" });
    this.canvas = make("canvas", { className: "strip", role: "img" });
    this.facts = make("div");
    this.problem = make("p", { className: "answer-error", hidden: true });
    this.inspect = make("button", { type: "button", className: "quiet", hidden: true });
    this.inspect.addEventListener("click", () => this.choose(this.now ?? 0));
    this.element = make("div", { className: "column" }, make("h3", {}, who), this.text, this.canvas, this.facts, this.problem, this.inspect);
    this.strip = new Strip(this.canvas, this.tokens, threshold?.value ?? null);
    this.words();
    this.text.addEventListener("click", (event) => event.target.n !== undefined && this.choose(event.target.n));
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("click", (event) => {
      const index = this.strip.tokenAt(event.clientX);
      if (index !== null && index < this.shown) this.choose(index);
    });
  }

  /** The texts, in the language of now. */
  words() {
    this.text.setAttribute("aria-label", t("answerLabel", { who: this.who }));
    this.inspect.textContent = t("inspect");
    const over = this.tokens.filter((token) => token.source).length;
    this.canvas.setAttribute("aria-label", t("stripLabel", { n: this.tokens.length, threshold: this.threshold ? short(this.threshold.value) : "-", over, model: this.models[0] }));
    if (this.summary) this.facts.replaceChildren(this.factList());
  }

  add(tokens) {
    this.tokens.push(...tokens);
    for (const token of tokens) this.unsaid += token.text;
    growing.add(this);
    frame ||= requestAnimationFrame(grow);
  }

  grow() {
    const upto = Math.min(this.tokens.length, this.shown + MOST_PER_FRAME);
    if (upto > this.shown) {
      const fresh = document.createDocumentFragment();
      for (; this.shown < upto; this.shown += 1) fresh.append(this.span(this.shown));
      this.text.append(fresh);
      this.tools.grown();
    }
    const now = performance.now();
    if (now - this.stripAt > STRIP_EVERY_MS) {
      this.stripAt = now;
      this.strip.grow();
    }
    if (now - this.saidAt > SAY_EVERY_MS) this.say();
    if (this.shown === this.tokens.length) this.rest();
  }

  rest() {
    if (this.tokens.length === this.strip.drawn || this.ended) growing.delete(this);
    if (this.ended) this.settle();
  }

  span(index) {
    const token = this.tokens[index];
    const span = document.createElement("span");
    span.className = `t m${token.source % 5}`;
    span.n = index;
    span.textContent = token.text;
    return span;
  }

  /** Whole sentences for a screen reader, now and then: never a token at a time. */
  say() {
    let end = 0;
    for (const found of this.unsaid.matchAll(SENTENCE_END)) end = found.index + 1;
    if (!end) return;
    this.saidAt = performance.now();
    this.tools.say(this.unsaid.slice(0, end));
    this.unsaid = this.unsaid.slice(end);
  }

  /** No more tokens come. `summary`: see factList; `problem`: a sentence, or null. */
  end(summary, problem) {
    this.summary = summary;
    this.ended = true;
    this.problem.hidden = !problem;
    this.problem.textContent = problem ?? "";
    this.text.classList.remove("still");
    growing.add(this);
    frame ||= requestAnimationFrame(grow);
  }

  settle() {
    this.strip.fit();
    this.inspect.hidden = !this.tokens.length;
    this.words();
    if (!this.tokens.length) return;
    const { tokens, time } = this.summary;
    this.tools.say(`${this.unsaid} ${t("finished", { n: this.tokens.length, parts: counted(tokens), time: number(time / 1000, 1) })}`);
    this.unsaid = "";
  }

  factList() {
    const { tokens, share, cost, time, first, handoffs } = this.summary;
    const count = this.tokens.length;
    const pairs = [[t("tokens"), counted(tokens)], [t("share"), percent(share)]];
    if (cost !== null) pairs.push([t("cost"), number(cost, 3)]);
    pairs.push([t("time"), `${number(time / 1000, 2)} s`]);
    if (first !== null) pairs.push([t("first"), `${number(first, 0)} ms`]);
    if (first !== null && count > 1) pairs.push([t("speed"), number((1000 * (count - 1)) / Math.max(time - first, 1), 0)]);
    if (handoffs !== null) pairs.push([t("handoffs"), number(handoffs)]);
    return terms(pairs, { className: "facts" });
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const last = this.shown - 1;
    if (last < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    let to = null;
    if (event.key in moves) to = this.now === null ? 0 : this.now + moves[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else if (event.key === "Enter" || event.key === " ") to = this.now ?? 0;
    if (to === null) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(to, 0), last), { focusCard: event.key === "Enter" });
  }

  /** Show this token's card. */
  choose(index, options = {}) {
    this.mark(index);
    this.tools.choose(this, index, options);
  }

  mark(index) {
    if (this.now !== null) this.text.children[this.now]?.classList.remove("now");
    this.now = index;
    if (index !== null) this.text.children[index]?.classList.add("now");
  }
}

export function counted(tokens) {
  return Object.entries(tokens)
    .map(([model, n]) => t("tokensBy", { model, n: number(n) }))
    .join(", ");
}
