"""Chat templates that would hang or fill a process, by what they do."""

SHARED = "{% set ns = namespace(x=[1]) %}{% for a in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TWO_SHARED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for a in range(50) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
SHARED_TUPLES = SHARED.replace("[1]", "(1,)").replace("[ns.x, ns.x]", "(ns.x, ns.x)")
GROWING = '{% set ns = namespace(x="aa") %}{% for a in range(60) %}{% set ns.x = '

TEMPLATES: dict[str, str] = {
    "multiplied text": '{{ "a" * 10**9 }}',
    "multiplied list": "{{ ([1] * 10**9) | length }}",
    "multiplied backwards": '{{ 10**9 * "a" }}',
    "power": "{{ 10 ** (10 ** 9) }}",
    "powers of powers": (
        "{% set ns = namespace(x=10) %}{% for a in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
    "nested ranges": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "one huge range": "{% for a in range(10**12) %}{% endfor %}",
    "nested loops over text": (
        '{% set s = "a" * 5000 %}{% for a in s %}{% for b in s %}{% for c in s %}{% end'
        "for %}{% endfor %}{% endfor %}"
    ),
    "doubling by plus": (
        '{% set ns = namespace(x="a") %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}'
    ),
    "doubling by tilde": (
        '{% set ns = namespace(x="a") %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}'
    ),
    "doubling by join": (
        '{% set ns = namespace(x="a") %}{% for a in range(60) %}{% set ns.x = [ns.x, ns'
        ".x] | join %}{% endfor %}"
    ),
    "doubling by str.join": GROWING + "ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "doubling by replace": GROWING + 'ns.x.replace("a", ns.x) %}{% endfor %}',
    "doubling by the replace filter": GROWING + 'ns.x | replace("a", ns.x) %}{% endfor %}',
    "doubling by format": GROWING + '"{0}{0}".format(ns.x) %}{% endfor %}',
    "doubling by percent": GROWING + '"%s%s" % (ns.x, ns.x) %}{% endfor %}',
    "doubling by the format filter": GROWING + '"%s%s" | format(ns.x, ns.x) %}{% endfor %}',
    "doubling by a macro": (
        '{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x="aa") %}{%'
        " for a in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}"
    ),
    "doubling by a set block": (
        '{% set ns = namespace(x="aa") %}{% for a in range(60) %}{% set y %}{{ ns.x }}{'
        "{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}"
    ),
    "doubling by escape": (
        '{% set ns = namespace(x="&") %}{% for a in range(60) %}{% set ns.x = (ns.x | s'
        "tring) | forceescape %}{% endfor %}"
    ),
    "doubling by urlencode": (
        '{% set ns = namespace(x="%") %}{% for a in range(60) %}{% set ns.x = ns.x | urlencode %}{% endfor %}'
    ),
    "doubling by tojson": (
        '{% set ns = namespace(x="\\"") %}{% for a in range(60) %}{% set ns.x = ns.x | tojson %}{% endfor %}'
    ),
    "doubling by lists": (
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "shared lists, written": SHARED + "{{ ns.x }}",
    "shared lists, as json": SHARED + "{{ ns.x | tojson }}",
    "shared lists, as text": SHARED + "{% set y = ns.x | string %}",
    "shared lists, compared": TWO_SHARED + "{{ n.x == n.y }}",
    "shared lists, looked for": TWO_SHARED + "{{ n.x in [n.y] }}",
    "shared lists, sorted": TWO_SHARED + "{{ [n.x, n.y] | sort | length }}",
    "shared lists, the largest": TWO_SHARED + "{% set z = [n.x, n.y] | max %}",
    "shared lists, tested": TWO_SHARED + "{{ n.x is eq(n.y) }}",
    "shared lists, counted": TWO_SHARED + "{{ [n.x].count(n.y) }}",
    "shared lists, in a format": SHARED + '{% set z = "%s" % (ns.x,) %}',
    "shared lists, selected": TWO_SHARED + '{{ [n.x] | select("eq", n.y) | list | length }}',
    "shared tuples as a key": SHARED_TUPLES + "{% set d = {ns.x: 1} %}",
    "shared tuples, asked for": SHARED_TUPLES + "{{ {}[ns.x] }}",
    "shared tuples, got": SHARED_TUPLES + "{{ {}.get(ns.x) }}",
    "shared namespaces": (
        "{% set n = namespace(x=1) %}{% for a in range(50) %}{% set m = namespace(a=n.x"
        ", b=n.x) %}{% set n.x = m %}{% endfor %}{{ n.x }}"
    ),
    "changed in a loop": TWO_SHARED + "{% for z in [n.x, n.y] %}{{ loop.changed(z) }}{% endfor %}",
    "a wide center": '{{ "a" | center(10**9) }}',
    "a wide str.center": '{{ "a".center(10**9) }}',
    "a wide ljust": '{{ "a".ljust(10**9) }}',
    "a wide rjust": '{{ "a".rjust(10**9) }}',
    "a wide zfill": '{{ "a".zfill(10**9) }}',
    "wide tabs": '{{ "\\t".expandtabs(10**9) }}',
    "a wide percent": '{{ "%1000000000d" % 1 }}',
    "a starred percent": '{{ "%*d" % (1000000000, 1) }}',
    "a wide format": '{{ "{:1000000000}".format(1) }}',
    "a nested format": '{{ "{:{}}".format(1, 1000000000) }}',
    "a wide format_map": '{{ "{a:1000000000}".format_map({"a": 1}) }}',
    "a wide format filter": '{{ "%1000000000d" | format(1) }}',
    "a wide percent behind a key": '{{ "%((a))100000d" % {"(a)": 1} }}',
    "a wide format behind a key": '{{ "{0[}]:100000}".format({"}": 1}) }}',
    "a wide format behind two keys": '{{ "{0[a][}]:100000}".format({"a": {"}": 1}}) }}',
    "a percent that is long to look through": '{{ ("%(" * 120000 + "%9999d") % {"a": 1} }}',
    "a format that is long to look through": '{{ ("{" + ":" * 60000 + "}{:9999}").format(1, 1) }}',
    "a precise percent": '{{ "%.1000000000f" % 1.0 }}',
    "a wide indent": '{{ "a\\nb" | indent(10**9) }}',
    "a wide json indent": '{{ {"a": 1} | tojson(indent=10**9) }}',
    "a wide json separator": '{% set s = "a" * 10**6 %}{{ range(90000) | list | tojson(separators=(s, s)) }}',
    "a wide wordwrap": '{{ "a b" | wordwrap(1, wrapstring="a" * 10**9) }}',
    "many batches": "{{ [1] | batch(10**9, 0) | list }}",
    "many slices": "{{ [1] | slice(10**9) | list }}",
    "round to many digits": '{{ 1.5 | round(10**9, "ceil") }}',
    "sum of lists": "{{ (([[1] * 5000] * 4000) | sum(start=[])) | length }}",
    "pprint": SHARED + "{{ ns.x | pprint }}",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "translate": '{{ ("a" * 10**6).translate({97: "b" * 10**6}) }}',
    "int to bytes": '{{ (1).to_bytes(10**9, "big") | length }}',
    "time": '{{ strftime_now("%1000000000d") }}',
    "a long time": '{{ strftime_now("%A" * 10**7) }}',
    "a macro that calls itself": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "macros that call two": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "macros without text": (
        "{% macro m(n) %}{% if n and m(n - 1) == m(n - 1) %}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a call block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 60
    + "a"
    + "{% endcall %}" * 60,
    "blocks that show themselves": "{% block b %}{{ self.b() }}{% endblock %}",
    "a loop whose filter never holds": (
        '{% set s = "a" * 10000 %}{% for a in s %}{% for b in s if b == "c" %}{% endfor'
        " %}{% for b in s if 0 %}{% endfor %}{% endfor %}"
    ),
    "a list in a generator": '{{ range(90000) | map("string") | map("center", 9000) | join | length }}',
    "a long join": '{{ ([" " * 10**6] * 10**5) | join(" " * 10**6) }}',
    "a long str.join": '{{ (" " * 10**6).join(["a"] * 10**5) }}',
    "own text in loops": "{% macro m() %}{% for a in range(90000) %}"
    + "text " * 10000
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "a filter block": (
        "{% set x %}{% for a in range(90000) %}{% filter center(9000) %}a{% endfilter %"
        "}{% endfor %}{% endset %}"
    ),
    "slices of slices": '{% set s = "a" * 10**6 %}{% for a in range(90000) %}{% set t = s[1:] %}{% endfor %}',
    "reversed": (
        "{% set s = [1] * 10**5 %}{% for a in range(90000) %}{% set t = s | reverse | list %}{% endfor %}"
    ),
    "splits": ('{% set s = "a " * 10**5 %}{% for a in range(90000) %}{% set t = s.split() %}{% endfor %}'),
    "counted lists": "{% set s = [1] * 10**5 %}{% for a in range(90000) %}{{ s.count(2) }}{% endfor %}",
    "looked for in lists": (
        "{% set s = [1] * 10**5 %}{% for a in range(90000) %}{% if 2 in s %}{% endif %}{% endfor %}"
    ),
    "compared texts": (
        '{% set s = "a" * 10**6 %}{% set t = "a" * (10**6 - 1) ~ "b" %}{% for a in rang'
        "e(90000) %}{% if s < t %}{% endif %}{% endfor %}"
    ),
    "equal texts": (
        '{% set s = "a" * 10**6 %}{% set t = "a" * (10**6 - 1) ~ "b" %}{% for a in rang'
        "e(90000) %}{% if s == t %}{% endif %}{% endfor %}"
    ),
    "tested texts": (
        '{% set s = "a" * 10**6 %}{% set t = "a" * (10**6 - 1) ~ "b" %}{% for a in rang'
        "e(90000) %}{% if s is eq t %}{% endif %}{% endfor %}"
    ),
    "dictionaries": (
        "{% set ns = namespace(d={}) %}{% for a in range(90000) %}{% set ns.d = dict(ns"
        ".d, **{a | string: 1}) %}{% endfor %}"
    ),
    "copies": "{% set s = [1] * 10**5 %}{% for a in range(90000) %}{% set t = s.copy() %}{% endfor %}",
    "numbers of many digits": '{{ "9" * 10**6 | int }}',
    "html stripped": '{{ ("<!--" * 10**5) | striptags }}',
    "links": '{{ ("http://a." * 10**5) | urlize }}',
    "attributes": '{{ {"a": "b" * 10**9} | xmlattr }}',
    "unique": '{{ ([[1] * 1000] * 10**5) | map("string") | unique | list | length }}',
    "groups": '{{ ([{"a": [1] * 1000}] * 10**5) | groupby("a") | list | length }}',
    "cyclic": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "raised": '{{ raise_exception("a" * 10**9) }}',
    "the length of a generator, then steps": (
        '{% for a in (range(90000) | map("string")) %}{% if loop.length %}{% for b in r'
        "ange(9000) %}{% endfor %}{% endif %}{% endfor %}"
    ),
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "folded at compile time": '{{ "a" ~ ("b" | center(10**9)) }}',
    "unpacked": '{% set a, b = ["x" * 10**9, 1] %}',
    "keyword arguments": (
        "{% macro m() %}{{ kwargs }}{% endmacro %}{% set ns = namespace(x=[1]) %}{% for"
        " a in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ m(a=ns.x) }}"
    ),
    "a conversion to text in a macro": (
        "{% macro m(x) %}{{ x ~ x }}{% endmacro %}{% set ns = namespace(x=[1]) %}{% for"
        " a in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ m(ns.x) }}"
    ),
    "attribute of a list of lists": '{{ ([[1] * 10**5] * 10**5) | map("length") | sum }}',
}
