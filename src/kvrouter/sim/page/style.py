"""The page's style sheet: light and dark, wide and narrow, on paper too."""

from kvrouter.sim.page.markup import Markup
from kvrouter.sim.page.series import COLOURS, DOTTED, REFERENCE, style

BACKGROUNDS = {"light": "#ffffff", "dark": "#16191d"}
"""What lines are drawn on."""

PALETTES = {
    "light": ("#0063b0", "#c94a00", "#00795c", "#8d3fae", "#8a6a00", "#c2185b", "#3f4650", "#0087a8"),
    "dark": ("#6cb4ff", "#ff9a5c", "#3ecfa0", "#cf9bf0", "#e0c04a", "#ff7fae", "#c3cad3", "#4fd3ee"),
}
"""The variants' colours. Each stands out from its background by 3 to 1 at least, as WCAG asks of graphics."""

DASHES = ("none", "7 3", "2 3", "9 3 2 3", "1 4", "12 4", "5 2 1 2 1 2", "3 6")
"""The dashes of the first ``COLOURS`` variants, of the next ones, and so on."""

_SHEET = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1240px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:27px;line-height:1.2;margin:0 0 18px;overflow-wrap:anywhere}
h2{font-size:19px;margin:0 0 4px}
h3{font-size:15px;margin:0}
p{margin:0}
.kicker{color:var(--soft);font-size:13px;letter-spacing:.06em;text-transform:uppercase;margin-bottom:2px}
.note,.about{color:var(--soft);font-size:13.5px}
.note{max-width:78ch;margin:0 0 14px}
.warning{background:var(--warn-back);border-left:4px solid var(--warn);padding:10px 14px;margin:0 0 18px;
border-radius:4px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,210px),1fr));gap:12px 24px;
margin:0 0 14px}
.facts dt{color:var(--soft);font-size:12.5px}
.facts dd{margin:0;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:20px;margin-top:20px}
.grid-of{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:22px 26px}
figure{margin:0;min-width:0;max-width:560px;display:flex;flex-direction:column;justify-content:space-between}
.plot{display:block;width:100%;height:auto;margin-top:6px}
.frame{fill:none;stroke:var(--rule)}
.grid{stroke:var(--rule);stroke-width:.8}
.tick,.mark-label{font-size:11.5px;fill:var(--soft);text-anchor:middle}
.tick.end{text-anchor:end}
.mark{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:3 3}
.series{transition:opacity .12s}
.line{fill:none;stroke:var(--own);stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round;
stroke-dasharray:var(--dash)}
.dot,.bar{fill:var(--own)}
.band{fill:var(--own);opacity:.16}
.bar.back{fill:var(--rule);opacity:.55}
.whisker,.halo{stroke:var(--ink);stroke-width:1.6;vector-effect:non-scaling-stroke}
.halo{stroke:var(--card);stroke-width:4.6}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;list-style:none;margin:0 0 16px;padding:0;font-size:13.5px}
.legend li{display:flex;align-items:center;gap:8px;min-width:0}
.legend span{overflow-wrap:anywhere;min-width:0}
.swatch{width:30px;height:10px;flex:none}
.bars{display:grid;gap:9px;margin-top:8px}
.bars .of{display:flex;justify-content:space-between;gap:12px;font-size:13.5px;line-height:1.35}
.bars .of span{overflow-wrap:anywhere}
.bars .of b{white-space:nowrap;font-variant-numeric:tabular-nums;font-weight:600}
.bars svg{display:block;width:100%;height:11px;margin-top:3px}
.scroll{overflow-x:auto}
.scroll+.grid-of{margin-top:22px}
section>.about{margin:0 0 14px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:6px 7px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap;
font-weight:400}
thead th{color:var(--soft);font-size:12.5px;vertical-align:bottom}
thead th[colspan]{text-align:center}
.begins{border-left:1px solid var(--rule)}
tbody th,.left{text-align:left}
tbody th{position:relative;padding-left:20px}
tbody th.number{padding-left:7px;min-width:0}
tbody th,td.left{white-space:normal;min-width:90px;max-width:300px;overflow-wrap:break-word}
tbody tr:last-child th,tbody tr:last-child td{border-bottom:0}
.best{font-weight:700}
.within{color:var(--soft);font-size:11.5px;font-weight:400}
.crosses{color:var(--warn)}
.key{position:absolute;left:2px;top:11px;width:10px;height:10px;border-radius:3px;background:var(--own)}
.terms{margin:0;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));
gap:8px 26px}
.terms dt{overflow-wrap:anywhere;font-weight:600;font-size:13.5px}
.terms dd{margin:0;color:var(--soft);font-size:13.5px}
@media (max-width:600px){main{padding:18px 12px 32px}section{padding:14px 12px}h1{font-size:22px}}
@media print{section{break-inside:avoid;border:0;padding:8px 0}body{font-size:12px}}
"""

_COLOURS = {
    "light": "--page:#f5f6f8;--card:#ffffff;--ink:#1c2127;--soft:#59626d;--rule:#dfe3e8;--warn:#a84300;"
    "--warn-back:#fff1e6;",
    "dark": "--page:#0e1013;--card:#16191d;--ink:#e8ebef;--soft:#a0a9b4;--rule:#2e343b;--warn:#ffab70;"
    "--warn-back:#3a2413;",
}


def sheet(n_variants: int) -> Markup:
    """Return the style sheet of a page with so many variants."""
    light, dark = (_COLOURS[name] + _variables(PALETTES[name]) for name in ("light", "dark"))
    own = "".join(
        f".{style(index)}{{--own:var(--c{index % COLOURS});--dash:{DASHES[index // COLOURS % len(DASHES)]}}}"
        f"section:has(.legend .{style(index)}:hover) .series:not(.{style(index)}){{opacity:.1}}"
        for index in range(n_variants)
    )
    return Markup(
        f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{_SHEET}{own}.{REFERENCE}{{--own:var(--ink)}}.{DOTTED}{{--dash:2 4}}"
    )


def _variables(palette: tuple[str, ...]) -> str:
    return "".join(f"--c{index}:{colour};" for index, colour in enumerate(palette))
