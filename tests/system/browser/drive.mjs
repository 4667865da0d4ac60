// Drives a page in a real browser: reads a command a line as JSON, and answers each with a line.
//
//     node drive.mjs MODULES PROGRAM
//
// MODULES is the folder of node_modules. `tests/system/browser/driver.py` is the other end.
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const [modules, program] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "drive.mjs"))("playwright-core");
const browser = await chromium.launch({ executablePath: program, args: ["--no-sandbox"] });

const UNTIL_MS = 40_000; // far above what a busy machine needs

let context;
let view;
let complaints = [];
let requests = [];

// A script is an expression of the page, or a function of it that is to be called.
function called(script) {
  return script.startsWith("() =>") ? `(${script})()` : script;
}

// The browser's own way to wait evaluates text in the page, which the page's policy rightly forbids.
async function until(script) {
  const ends = Date.now() + UNTIL_MS;
  for (;;) {
    const value = await view.evaluate(called(script));
    if (value) return value;
    if (Date.now() > ends) throw new Error("it did not come true");
    await view.waitForTimeout(40);
  }
}

// Runs in the page before its own scripts: what keeps its thread for long is noted.
function noteLongTasks() {
  window.longTasksMs = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.longTasksMs.push(Math.round(entry.duration));
  }).observe({ type: "longtask", buffered: true });
}

const commands = {
  async open({ url, scheme = "light", width = 1280, height = 900, answers = {} }) {
    await context?.close();
    [complaints, requests] = [[], []];
    context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme });
    await context.addInitScript(noteLongTasks);
    view = await context.newPage();
    view.on("console", (message) => complaints.push(message.text()));
    view.on("pageerror", (error) => complaints.push(String(error)));
    view.on("dialog", (dialog) => complaints.push(dialog.message()) && dialog.dismiss());
    view.on("request", (request) => requests.push(request.url()));
    for (const [path, body] of Object.entries(answers)) {
      await view.route(`**${path}`, (route) => route.fulfill({ contentType: "application/json", body }));
    }
    const response = await view.goto(url);
    return response.status();
  },
  evaluate: ({ script }) => view.evaluate(called(script)),
  until: ({ script }) => until(script),
  click: ({ selector }) => view.click(selector),
  fill: ({ selector, text }) => view.fill(selector, text),
  press: ({ key }) => view.keyboard.press(key),
  type: ({ text }) => view.keyboard.type(text),
  size: ({ width, height }) => view.setViewportSize({ width, height }),
  async picture({ path }) {
    const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    await view.evaluate(drawn); // without a drawn frame this browser at times cannot take a picture
    await view.screenshot({ path });
  },
  noted: () => ({ complaints, requests }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { name, ...given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await commands[name](given)) ?? null };
  } catch (error) {
    answer = { error: `${name} ${JSON.stringify(given).slice(0, 300)}: ${error}` };
  }
  console.log(JSON.stringify(answer));
}
await browser.close();
