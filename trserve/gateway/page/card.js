// The card of one token. Knows an answer's tokens, not where they came from.

import { chance, number, short, t } from "./catalogue.js";
import { byId, make } from "./dom.js";

const card = byId("card");
const said = byId("token-said");
let shown = null;

/** A token's text with its spaces and line ends to be seen. */
function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

function scoreText(token, threshold) {
  if (token.score === null) return t("noScore");
  const score = short(token.score);
  if (!threshold) return score;
  const places = { score, name: threshold.name, threshold: short(threshold.value) };
  return t(token.score > threshold.value ? "scoreOver" : "scoreUnder", places);
}

function button(key, act, enabled = true) {
  const made = make("button", { type: "button", className: "quiet", disabled: !enabled }, t(key));
  made.dataset.act = key;
  made.addEventListener("click", act);
  return made;
}

function facts(answer, token) {
  const handoff = token.handoffUs === null ? t("noHandoff") : `${number(token.handoffUs)} µs`;
  const rows = [
    [t("writer"), answer.models[token.source]],
    [t("score"), scoreText(token, answer.threshold)],
    [t("handoff"), handoff],
    [t("alone"), token.alone ? t("aloneYes") : t("aloneNo")],
  ];
  if (token.logprob !== null) rows.splice(2, 0, [t("probability"), chance(Math.exp(token.logprob))]);
  return make("dl", {}, ...rows.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

function alternatives(answer, token) {
  if (!token.tops.length) return null;
  const rows = token.tops.map(([text, logprob]) => make("tr", {}, make("td", {}, make("code", {}, visible(text))), make("td", {}, chance(Math.exp(logprob)))));
  return make("table", {}, make("caption", {}, t("alternatives", { model: answer.models[token.source] })), make("tbody", {}, ...rows));
}

function otherAfter(answer, index) {
  const source = answer.tokens[index].source;
  for (let next = index + 1; next < answer.shown; next += 1) if (answer.tokens[next].source !== source) return next;
  return null;
}

/** The card of the token under the pointer, or of none; one that was chosen stays. */
export function peekCard(answer, index) {
  if (shown && !shown.isPeek) return;
  if (index === undefined) {
    if (shown?.answer === answer) hideCard();
  } else {
    answer.mark(index);
    showCard(answer, index, { isPeek: true });
  }
}

export function showCard(answer, index, { focusCard = false, focusOn = null, isPeek = false } = {}) {
  if (shown && shown.answer !== answer) shown.answer.mark(null);
  shown = { answer, index, isPeek };
  const token = answer.tokens[index];
  const go = (to, key) => () => answer.choose(to, { focusOn: key });
  const other = otherAfter(answer, index);
  const title = t("card", { n: index + 1, of: answer.tokens.length });
  const parts = [
    make("header", {}, make("strong", {}, title), button("close", () => hideCard())),
    make("p", {}, make("code", {}, visible(token.text || token.name))),
    make("nav", { ariaLabel: title }, button("previous", go(index - 1, "previous"), index > 0), button("next", go(index + 1, "next"), index + 1 < answer.shown), button("nextOther", go(other, "nextOther"), other !== null)),
    facts(answer, token),
    alternatives(answer, token),
  ];
  card.replaceChildren(...parts.filter(Boolean));
  card.setAttribute("aria-label", title);
  card.hidden = false;
  if (isPeek) return;
  said.textContent = t("tokenSaid", { token: token.text.trim() || visible(token.text), model: answer.models[token.source], score: scoreText(token, answer.threshold) });
  const target = focusOn ? card.querySelector(`[data-act="${focusOn}"]:enabled`) ?? card.querySelector("[data-act=close]") : focusCard ? card.querySelector("[data-act=next]:enabled, [data-act=close]") : null;
  target?.focus();
}

/** True where there was one. */
export function hideCard() {
  if (!shown) return false;
  const { answer } = shown;
  shown = null;
  const had = card.contains(document.activeElement);
  card.hidden = true;
  answer.mark(null);
  if (had) answer.text.focus();
  return true;
}

/** The answer is no more on the page. */
export function forgetCard() {
  shown = null;
  card.hidden = true;
}

/** The texts, in the language of now. */
export function cardWords() {
  if (shown) showCard(shown.answer, shown.index, { isPeek: shown.isPeek });
}
