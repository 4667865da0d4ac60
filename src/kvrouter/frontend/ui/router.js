// The page's requests to the router, with relative URLs, to work behind a proxy's path.

const TOKEN = "kvrouter-admin-token";
const ANSWERS_WITHIN_MS = 10_000;
const LONG_ID = /_id":\s*\d{16}/;

// Thrown when the router does not answer in time.
export class Unreachable extends Error {}

// Thrown for an error answer of the router, with its `status` and `code`.
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
    this.refusals = error?.refusals ?? {};
  }
}

export function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function useToken(given) {
  if (given) sessionStorage.setItem(TOKEN, given);
  else sessionStorage.removeItem(TOKEN);
}

// Worker ids may exceed JavaScript's exact integers: those become strings.
function exact(_key, value, context) {
  const isInexact = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
  return isInexact && context ? context.source : value;
}

function parsed(text) {
  return LONG_ID.test(text) ? JSON.parse(text, exact) : JSON.parse(text);
}

async function answered(path, options) {
  try {
    const response = await fetch(path, options);
    return { response, text: await response.text() };
  } catch (error) {
    throw new Unreachable(error.message);
  }
}

export async function ask(path, body) {
  const headers = {};
  if (token()) headers.authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const { response, text } = await answered(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    cache: "no-store",
    credentials: "same-origin",
    signal: AbortSignal.timeout(ANSWERS_WITHIN_MS),
  });
  if (response.ok) return parsed(text);
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    // a proxy's error page: only the status is known
  }
  throw new Refused(response.status, error);
}
