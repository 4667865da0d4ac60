"""Chat templates that show all that a template is given: in JSON, every key in its order.

``text`` takes contents as text. ``parts`` loops over them, and knows the role ``developer``. ``strict``
refuses a system message that is not the first one.
"""

from collections.abc import Mapping

_ALL = (
    "{# every message has a role and a content #}"
    "{% for message in messages %}<|turn|>{{ message | tojson }}\n{% endfor %}"
    "{% if tools %}<|turn|>{{ tools | tojson }}\n{% endif %}"
    "{% if documents %}<|turn|>{{ documents | tojson }}\n{% endif %}"
    "{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }}\n"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

TEMPLATES: Mapping[str, str] = {
    "text": _ALL,
    "parts": (
        "{% for message in messages %}{% if message['role'] == 'developer' %}D{% endif %}"
        "{% for part in message['content'] %}{{ part | tojson }}{% endfor %}{% endfor %}" + _ALL
    ),
    "strict": (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('system first') }}{% endif %}{% endfor %}" + _ALL
    ),
}
