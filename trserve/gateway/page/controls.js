// The router's parameters and the settings of the next request. Knows what the server says of them.

import { short, t } from "./catalogue.js";
import { byId, make } from "./dom.js";

const STEPS = 1000;
let router = null;
const chosen = new Map();

/** The parameters as /v1/trserve/about tells them. */
export function useRouter(told) {
  router = told;
  for (const name of chosen.keys()) if (!told.parameters.some((each) => each.name === name)) chosen.delete(name);
  draw();
}

export function draw() {
  if (!router) return;
  const some = router.parameters.length > 0;
  byId("router-name").textContent = !router.known ? t("routerLater") : t(some ? "routerIs" : "routerNone", { name: router.name });
  const reset = make("button", { type: "button", id: "reset", className: "quiet", disabled: !chosen.size }, t("reset"));
  reset.addEventListener("click", () => {
    chosen.clear();
    draw();
    byId(`parameter-${router.parameters[0].name}`).focus();
  });
  byId("parameters").replaceChildren(...router.parameters.map(field), ...(some ? [reset] : []));
}

function valueOf(parameter) {
  return chosen.get(parameter.name) ?? parameter.value;
}

// Small thresholds are told apart more finely than large ones: a step is one of the root.
const toSlider = (value, { minimum, maximum }) => Math.round(STEPS * Math.sqrt((value - minimum) / (maximum - minimum)));
const fromSlider = (at, { minimum, maximum }) => Number((minimum + (maximum - minimum) * (at / STEPS) ** 2).toPrecision(3));

function field(parameter) {
  const { name, help, minimum, maximum, value } = parameter;
  const id = `parameter-${name}`;
  const exact = make("input", { id, type: "number", step: "any", value: valueOf(parameter) ?? "" });
  if (minimum !== null) exact.min = minimum;
  if (maximum !== null) exact.max = maximum;
  const told = value === null ? "" : t("serverValue", { value: short(value) });
  const hint = make("p", { className: "hint", id: `${id}-help` }, help, told ? ` (${told})` : "");
  exact.setAttribute("aria-describedby", hint.id);
  const label = make("label", { htmlFor: id }, make("span", {}, name));
  const ranged = minimum !== null && maximum !== null && value !== null;
  const slider = ranged ? make("input", { type: "range", min: 0, max: STEPS, step: 1, ariaLabel: `${name}: ${help}` }) : null;

  const follow = () => {
    if (!slider) return;
    slider.value = toSlider(valueOf(parameter), parameter);
    slider.setAttribute("aria-valuetext", short(valueOf(parameter)));
  };
  exact.addEventListener("input", () => {
    if (exact.value === "" || !exact.checkValidity()) return;
    choose(name, Number(exact.value), value);
    follow();
  });
  exact.addEventListener("change", () => {
    if (exact.value === "" || !exact.checkValidity()) exact.value = valueOf(parameter) ?? "";
  });
  slider?.addEventListener("input", () => {
    choose(name, fromSlider(Number(slider.value), parameter), value);
    exact.value = valueOf(parameter);
    slider.setAttribute("aria-valuetext", short(valueOf(parameter)));
  });
  follow();
  return make("div", { className: "field" }, label, slider ? make("div", { className: "slide" }, slider, exact) : exact, hint);
}

function choose(name, value, serverValue) {
  if (value === serverValue) chosen.delete(name);
  else chosen.set(name, value);
  byId("reset").disabled = !chosen.size;
}

/** What differs from the server's values, by name. */
export function chosenValues() {
  return Object.fromEntries(chosen);
}

/** The router's first parameter and the value that a request of now gets, or null. */
export function threshold() {
  const first = router?.parameters[0];
  const value = first ? valueOf(first) : null;
  return value === null || value === undefined ? null : { name: first.name, value };
}

function numberOf(id) {
  const { value, validity } = byId(id);
  return value === "" || !validity.valid ? null : Number(value);
}

/** The members of a request that the fields decide on. */
export function sampling() {
  const seed = numberOf("seed");
  return {
    temperature: numberOf("temperature") ?? 0,
    max_tokens: numberOf("max-tokens") ?? 512,
    ...(seed === null ? {} : { seed }),
    ...(byId("ignore-eos").checked ? { ignore_eos: true } : {}),
    logprobs: true,
    top_logprobs: numberOf("tops") ?? 0,
  };
}

export function systemPrompt() {
  return byId("system").value.trim();
}
