// Unpacks the browser into $TMPDIR, once, and prints where its program is.
import chromium from "@sparticuz/chromium";

console.log(await chromium.executablePath());
