// What the page says, in each of its languages. Knows no page: only keys, texts and {places}.

export const TEXTS = {
  en: {
    skip: "Skip to the prompt", language: "Language", dark: "Dark", light: "Light", conversation: "Conversation",
    keyLabel: "API key", keyUse: "Use this key", keyHint: "This server asks for a key. It is kept in this tab only and is gone when the tab is closed.", keyWrong: "The server does not take this key: {why}",
    promptLabel: "Your message", promptPlace: "Ask something", who: "Written by", routed: "all, routed", onlyModel: "{model} only", sideBySide: "side by side",
    send: "Send", stop: "Stop", keysHint: "Enter sends, Shift+Enter begins a line, Esc stops. In an answer the arrow keys go from token to token.",
    copyCurl: "Copy as curl", copyPython: "Copy as Python", export: "Save as JSON", exportCsv: "Save as CSV", clear: "New conversation", plain: "Plain text",
    copied: "Copied.", copyFailed: "The browser does not let this page copy. Here it is:",
    empty: "Each token of an answer shows the model that wrote it, by its colour and its underline. Move the threshold and ask again, or let the models answer side by side.",
    emulated: "Emulated: steps take a device's time, and the tokens are made up.",
    routing: "Routing", routerIs: "Router {name}. Values hold for your next request.", routerNone: "Router {name}. It has nothing that a request may set.", routerLater: "Its parameters are known once the models are loaded.",
    reset: "Server's values", serverValue: "server: {value}", more: "Sampling and limits", system: "System prompt", temperature: "Temperature", maxTokens: "Tokens at most", seed: "Seed", tops: "Alternatives per token",
    topsHint: "Alternatives are kept in the server's memory while it writes: for very long answers ask for fewer.", ignoreEos: "Go on to the token limit",
    live: "Live", liveWait: "Waiting for the server's statistics.", liveOn: "The last two minutes, one value a second.", liveFull: "Too many pages follow this server's statistics; the next try is in a few seconds.",
    plotTokens: "Tokens per second", plotShare: "Share not written by {model}", plotFirst: "First token, ms", plotBetween: "Between tokens, ms", plotQueue: "Requests", plotRows: "Requests in a step",
    p50: "p50", p99: "p99", liveRequests: "running {n}", waiting: "queued {n}", pending: "pending {n}", none: "none yet",
    colModel: "Model", colRunning: "Runs", colPending: "Pends", colRows: "Batch", colB: "B", colWhy: "Opened by", colKv: "KV",
    whyThreshold: "enough", whyNobody: "nobody else", whyTimeout: "longest wait", whyDrain: "drain",
    serving: "Ready", loading: "The models are loading", draining: "The server is shutting down and takes no new requests", lost: "A model is lost and the server ends", unreachable: "The server does not answer", degraded: "Degraded: {why}", notReady: "Not ready: {why}",
    modelUp: "up", modelRestarting: "restarting", modelLost: "lost",
    runs: "Runs", runWho: "Written by", runParameters: "Router", runTokens: "Tokens", runShare: "Share", runCost: "Cost", runFirst: "First token", runTime: "Time",
    costNote: "Cost: weights a token meets, {model} alone = 1.",
    tokensBy: "{n} by {model}", share: "share", cost: "cost", time: "time", first: "first token", speed: "tokens/s", handoffs: "handoffs", tokens: "tokens",
    answerLabel: "Answer, {who}. Arrow keys go from token to token, Enter opens a token's card.", stripLabel: "Scores of {n} tokens; threshold {threshold}; {over} by other models than {model}.", inspect: "Inspect tokens",
    you: "You", finished: "Answer finished: {n} tokens, {parts}, {time} s.", started: "The answer begins.", stopped: "Stopped. What was written stays.", cutOff: "Cut off at the token limit.", degradedAnswer: "A model was lost while this was written.",
    card: "Token {n} of {of}", close: "Close", previous: "Previous", next: "Next", nextOther: "Next by another model", writer: "Model", score: "Score", scoreOver: "{score}, above {name} = {threshold}", scoreUnder: "{score}, not above {name} = {threshold}", noScore: "the router has none", probability: "Probability", handoff: "Handoff", noHandoff: "none: the same model went on", alone: "For a lost model", aloneYes: "yes: it should have written this", aloneNo: "no", alternatives: "What {model} might have written", tokenSaid: "{token}, {model}, {score}",
    failed: "The request failed ({status}): {why}", brokenOff: "The connection ended before the answer did.", noServer: "The server cannot be reached: {why}",
    waitFor: "Not taken now: {why}",
  },
  ko: {
    skip: "입력란으로 건너뛰기", language: "언어", dark: "어둡게", light: "밝게", conversation: "대화",
    keyLabel: "API 키", keyUse: "이 키 사용", keyHint: "이 서버는 키를 요구합니다. 키는 이 탭에만 보관되며 탭을 닫으면 사라집니다.", keyWrong: "서버가 이 키를 받아들이지 않습니다: {why}",
    promptLabel: "메시지", promptPlace: "질문을 입력하세요", who: "작성", routed: "모두 (라우팅)", onlyModel: "{model}만", sideBySide: "나란히 비교",
    send: "보내기", stop: "중지", keysHint: "Enter로 보내고 Shift+Enter로 줄을 바꾸며 Esc로 중지합니다. 답변 안에서는 화살표 키로 토큰을 옮겨 다닙니다.",
    copyCurl: "curl로 복사", copyPython: "Python으로 복사", export: "JSON으로 저장", exportCsv: "CSV로 저장", clear: "새 대화", plain: "꾸밈 없이",
    copied: "복사했습니다.", copyFailed: "브라우저가 복사를 허용하지 않습니다. 내용은 다음과 같습니다:",
    empty: "답변의 토큰마다 어느 모델이 썼는지 색과 밑줄로 보여 줍니다. 임계값을 움직여 다시 묻거나, 모델들의 답변을 나란히 비교해 보세요.",
    emulated: "에뮬레이션: 스텝은 장치의 시간만큼 걸리고 토큰은 꾸며낸 것입니다.",
    routing: "라우팅", routerIs: "라우터 {name}. 값은 다음 요청부터 적용됩니다.", routerNone: "라우터 {name}. 요청별로 바꿀 수 있는 값이 없습니다.", routerLater: "매개변수는 모델을 불러온 뒤에 알 수 있습니다.",
    reset: "서버 값으로", serverValue: "서버: {value}", more: "샘플링과 한도", system: "시스템 프롬프트", temperature: "온도", maxTokens: "최대 토큰 수", seed: "시드", tops: "토큰당 대안 수",
    topsHint: "대안은 쓰는 동안 서버 메모리에 보관됩니다. 아주 긴 답변에는 적게 요청하세요.", ignoreEos: "토큰 한도까지 계속 쓰기",
    live: "실시간", liveWait: "서버 통계를 기다리는 중입니다.", liveOn: "최근 2분, 1초에 값 하나.", liveFull: "이 서버의 통계를 보는 페이지가 너무 많습니다. 몇 초 뒤 다시 시도합니다.",
    plotTokens: "초당 토큰", plotShare: "{model} 외 모델의 비율", plotFirst: "첫 토큰, ms", plotBetween: "토큰 간격, ms", plotQueue: "요청", plotRows: "한 스텝의 요청 수",
    p50: "p50", p99: "p99", liveRequests: "실행 {n}", waiting: "대기열 {n}", pending: "보류 {n}", none: "아직 없음",
    colModel: "모델", colRunning: "실행", colPending: "보류", colRows: "배치", colB: "B", colWhy: "시작 이유", colKv: "KV",
    whyThreshold: "충분함", whyNobody: "기다릴 요청 없음", whyTimeout: "최대 대기", whyDrain: "종료 중",
    serving: "준비됨", loading: "모델을 불러오는 중입니다", draining: "서버가 종료 중이라 새 요청을 받지 않습니다", lost: "모델을 잃어 서버가 종료됩니다", unreachable: "서버가 응답하지 않습니다", degraded: "일부만 작동: {why}", notReady: "준비되지 않음: {why}",
    modelUp: "작동", modelRestarting: "다시 시작 중", modelLost: "잃음",
    runs: "실행 기록", runWho: "작성", runParameters: "라우터", runTokens: "토큰", runShare: "비율", runCost: "비용", runFirst: "첫 토큰", runTime: "시간",
    costNote: "비용: 토큰이 거치는 가중치 수, {model} 단독 = 1.",
    tokensBy: "{model} {n}개", share: "비율", cost: "비용", time: "시간", first: "첫 토큰", speed: "토큰/초", handoffs: "넘김", tokens: "토큰",
    answerLabel: "답변, {who}. 화살표 키로 토큰을 옮겨 다니고 Enter로 카드를 엽니다.", stripLabel: "토큰 {n}개의 점수, 임계값 {threshold}, {model} 외 모델이 {over}개 작성.", inspect: "토큰 살펴보기",
    you: "나", finished: "답변 완료: 토큰 {n}개, {parts}, {time}초.", started: "답변이 시작됩니다.", stopped: "중지했습니다. 쓰인 내용은 남습니다.", cutOff: "토큰 한도에서 끊겼습니다.", degradedAnswer: "쓰는 동안 모델 하나를 잃었습니다.",
    card: "토큰 {of}개 중 {n}번째", close: "닫기", previous: "이전", next: "다음", nextOther: "다른 모델의 다음 토큰", writer: "모델", score: "점수", scoreOver: "{score}, {name} = {threshold} 초과", scoreUnder: "{score}, {name} = {threshold} 이하", noScore: "이 라우터에는 없음", probability: "확률", handoff: "넘김", noHandoff: "없음: 같은 모델이 이어서 씀", alone: "잃은 모델 대신", aloneYes: "예: 그 모델이 썼어야 할 토큰", aloneNo: "아니요", alternatives: "{model}의 다른 후보", tokenSaid: "{token}, {model}, {score}",
    failed: "요청이 실패했습니다 ({status}): {why}", brokenOff: "답변이 끝나기 전에 연결이 끊겼습니다.", noServer: "서버에 연결할 수 없습니다: {why}",
    waitFor: "지금은 받지 않습니다: {why}",
  },
};

const STORED = "trserve-language";
let language = "en";

export function languageNow() {
  return language;
}

/** The text of a key, its {places} filled in. */
export function t(key, values = {}) {
  const text = TEXTS[language][key] ?? TEXTS.en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (place, name) => (name in values ? String(values[name]) : place));
}

/** The language that was chosen before, else the browser's. */
export function firstLanguage() {
  let stored = null;
  try {
    stored = localStorage.getItem(STORED);
  } catch {
    stored = null; // storage is switched off: the browser's language will do
  }
  const wanted = [stored, ...(navigator.languages ?? [navigator.language])];
  return wanted.map((each) => (each ?? "").slice(0, 2)).find((each) => each in TEXTS) ?? "en";
}

/** Use a language for everything that is marked with data-t, and for t() from now on. */
export function useLanguage(wanted, { store = false } = {}) {
  language = wanted in TEXTS ? wanted : "en";
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  if (!store) return;
  try {
    localStorage.setItem(STORED, language);
  } catch {
    return; // it holds for this visit
  }
}

const formats = new Map();

/** A number with so many digits after the point, in the language's way. */
export function number(value, digits = 0) {
  const key = `${language} ${digits}`;
  if (!formats.has(key)) formats.set(key, new Intl.NumberFormat(language, { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return formats.get(key).format(value);
}

export function percent(value) {
  return `${number(100 * value, 1)}\u00a0%`;
}

/** A probability, of which small ones are not nothing. */
export function chance(value) {
  return value > 0 && value < 0.0005 ? `<\u00a0${number(0.1, 1)}\u00a0%` : percent(value);
}

/** A score or a threshold: three digits that say something, however small it is. */
export function short(value) {
  if (value === null || value === undefined) return "";
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}
