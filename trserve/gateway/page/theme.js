// Light or dark, and the colours of the style sheet for what is drawn on canvases.

const STORED = "trserve-theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
let found = null;

function stored() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null; // storage is switched off: the system's choice holds
  }
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : dark.matches;
}

export function onTheme(listener) {
  listeners.push(listener);
}

function changed() {
  found = null;
  for (const listener of listeners) listener();
}

export function useTheme(name) {
  if (name !== "dark" && name !== "light") return;
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem(STORED, name);
  } catch {
    found = null; // it holds for this visit
  }
  changed();
}

export function firstTheme() {
  useTheme(stored());
  dark.addEventListener("change", changed);
}

/** Colours by name, read from the style sheet once for each theme. */
export function colours() {
  if (found) return found;
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  found = { ink: value("--ink"), soft: value("--soft"), line: value("--line"), models: [0, 1, 2, 3, 4].map((n) => value(`--m${n}`)) };
  return found;
}
