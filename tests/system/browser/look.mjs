// Opens a page in a browser without a network, in every width and colour scheme, and prints what it saw as JSON.
//
//     node look.mjs MODULES PROGRAM PAGE FOLDER WIDTH,WIDTH
//
// MODULES is the folder of node_modules; FOLDER gets a picture of what each view shows first.
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, program, page, folder, widths] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "look.mjs"))("playwright-core");
const address = pathToFileURL(page).href;

// Runs in the page. Boxes are in pixels of the window, from the page's upper left corner.
function seen() {
  const box = (node) => {
    const { x, y, width, height } = node.getBoundingClientRect();
    return { x: x + scrollX, y: y + scrollY, width, height };
  };
  const all = (root, what) => [...root.querySelectorAll(what)];
  return {
    title: document.title,
    text: document.body.innerText,
    background: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    inner_width: document.documentElement.clientWidth,
    scroll_width: document.documentElement.scrollWidth,
    plots: all(document, "svg.plot").map((svg) => ({
      label: svg.getAttribute("aria-label"),
      box: box(svg),
      frame: box(svg.querySelector(".frame")),
      marks: all(svg, ".mark").map(box),
      texts: all(svg, "text").map((node) => ({ text: node.textContent, box: box(node) })),
      lines: all(svg, ".line, .dot, .band").map((node) => ({
        name: node.parentNode.firstChild.textContent,
        kind: node.getAttribute("class"),
        box: box(node),
        stroke: getComputedStyle(node).stroke,
        fill: getComputedStyle(node).fill,
      })),
    })),
    tables: all(document, ".scroll").map((region) => ({
      label: region.getAttribute("aria-label"),
      box: box(region),
      text: region.innerText,
    })),
    sections: all(document, "section").map((node) => ({ title: node.querySelector("h2").innerText, box: box(node) })),
  };
}

// How strongly the lines of the first plot are drawn while the pointer is on the legend's last entry.
async function pointed(view) {
  const entry = view.locator(".legend").first().locator("li").last();
  await entry.hover();
  const faded = await view.waitForFunction(() => {
    const found = [...document.querySelector("svg.plot").querySelectorAll(".series")];
    const strengths = found.map((node) => [node.firstChild.textContent, Number(getComputedStyle(node).opacity)]);
    return strengths.some(([, opacity]) => opacity <= 0.1) && strengths;
  });
  return Object.fromEntries(await faded.jsonValue());
}

// Runs in the page: waits until it was drawn.
function drawn() {
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}

const browser = await chromium.launch({ executablePath: program, args: ["--no-sandbox"] });
const views = [];
for (const scheme of ["light", "dark"]) {
  for (const width of widths.split(",").map(Number)) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme, offline: true });
    const view = await context.newPage();
    const complaints = [];
    const requests = [];
    view.on("console", (message) => complaints.push(message.text()));
    view.on("pageerror", (error) => complaints.push(String(error)));
    view.on("dialog", (dialog) => complaints.push(dialog.message()) && dialog.dismiss());
    view.on("request", (request) => request.url() !== address && requests.push(request.url()));
    await view.goto(address);
    const picture = join(folder, `${scheme}-${width}.png`);
    await view.evaluate(drawn); // without a drawn frame this browser at times cannot take a picture
    await view.screenshot({ path: picture }); // of the window: this browser at times cannot take the whole page
    const found = await view.evaluate(seen);
    views.push({ scheme, width, complaints, requests, picture, ...found, pointed: await pointed(view) });
    await context.close();
  }
}
const version = browser.version();
await browser.close();
console.log(JSON.stringify({ version, views }));
