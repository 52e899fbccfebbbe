"""What `format` means, as patterns: the same texts in every back end.

Each pattern allows no text that the format forbids, and may forbid a few that it allows (29 February, quoted local
parts of addresses). A format that is not here cannot be enforced, and is told so.
"""

from __future__ import annotations

_DAY_28 = "(?:0[1-9]|1\\d|2[0-8])"
_YEAR = "(?:[1-9]\\d{3}|0(?:[1-9]\\d{2}|0(?:[1-9]\\d|0[1-9])))"  # there is no year 0000
_DATE = f"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-{_DAY_28})"
_OFFSET = "(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"
_TIME = "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,9})?" + _OFFSET
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9]|[a-zA-Z0-9]{1,10}-[a-zA-Z0-9]{1,10}|[a-zA-Z0-9]{0,20})"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,4}}"
_BYTE = "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = f"(?:(?:{_GROUP}:){{7}}{_GROUP}|::(?:{_GROUP}:){{0,5}}{_GROUP}|(?:{_GROUP}:){{1,5}}:{_GROUP}|::)"
_PATH = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2})*"
_DURATION_DATE = "(?:\\d+Y(?:\\d+M(?:\\d+D)?)?|\\d+M(?:\\d+D)?|\\d+D)"
_DURATION_TIME = "T(?:\\d+H(?:\\d+M(?:\\d+S)?)?|\\d+M(?:\\d+S)?|\\d+S)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|\\d+W)",
    "email": f"[a-zA-Z0-9_+-]+(?:\\.[a-zA-Z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": f"[a-zA-Z][a-zA-Z0-9+.-]*://{_HOST}(?::\\d{{1,5}})?(?:/{_PATH})?(?:\\?{_PATH})?(?:#{_PATH})?",
}
FORMATS["idn-email"] = FORMATS["email"]
FORMATS["idn-hostname"] = FORMATS["hostname"]
FORMATS["iri"] = FORMATS["uri"]
FORMATS["uri-reference"] = FORMATS["iri-reference"] = f"(?:/{_PATH}|{FORMATS['uri']})"
FORMATS["json-pointer"] = "(?:/(?:[^~/]|~[01])*)*"
