// Elements made in one line each. Knows nothing of what they are for.

export const byId = (id) => document.getElementById(id);

/** An element with properties, and children that are elements or texts. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A list of terms and their values. */
export function terms(pairs, properties = {}) {
  return make("dl", properties, ...pairs.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))));
}

/** Have `file` saved under this name. */
export function save(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
