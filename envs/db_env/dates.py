"""MySQL's functions of dates and times, over texts; imports only the standard library, for the database workers.

A date is a text such as 2021-03-04 or 2021-3-4 10:00:00; what is no date gives NULL. Formats are in Python's letters, into
which sqlglot turns MySQL's.
"""

from __future__ import annotations

import calendar
import datetime
import re
from collections.abc import Callable
from typing import Any

_SECONDS = {"SECOND": 1, "MINUTE": 60, "HOUR": 3600, "DAY": 86_400, "WEEK": 604_800}
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}


def _whole(value: Any) -> int:
    found = re.match(r"\s*[-+]?\d{1,9}", str(value))
    return int(found.group()) if found else 0


def when(value: Any) -> Any:
    """The datetime that MySQL reads from a text or number, or None."""
    found = re.match(r"\s*(\d{4})(\D?)(\d{1,2})\2(\d{1,2})(?:[ T]+(\d{1,2}):(\d{1,2})(?::(\d{1,2}))?)?", str(value))
    if not found:
        return None
    year, month, day, *clock = (int(part or 0) for part in found.group(1, 3, 4, 5, 6, 7))
    try:
        return datetime.datetime(year, month, day, *clock)
    except ValueError:
        return None


def of_date(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of one date that is NULL where its argument is none."""
    return lambda value: None if (date := when(value)) is None else read(date)


def clock(value: Any) -> tuple[int, int, int] | None:
    """Hours, minutes and seconds of a time, or of a date with a time."""
    found = re.match(r"(?:.*[ T])?(\d+):(\d{1,2})(?::(\d{1,2}))?", str(value))
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0) if when(value) else None


def shown(date: Any, with_time: bool) -> str:
    return date.strftime("%Y-%m-%d %H:%M:%S" if with_time else "%Y-%m-%d").rjust(19 if with_time else 10, "0")


def str_to_date(value: Any, form: Any) -> str | None:
    """The date that `form` (in Python's letters) finds at the start of a text; NULL if it does not fit."""
    value, form = str(value).strip(), str(form).replace("%-", "%")         # reading needs no mark for missing zeros
    timed = any(mark in form for mark in ("%H", "%I", "%M", "%S", "%T"))
    try:
        return shown(datetime.datetime.strptime(value, form), timed)
    except ValueError as error:
        rest = re.fullmatch(r"unconverted data remains: (.*)", str(error), re.S)
        return str_to_date(value[:-len(rest[1])], form) if rest else None


def date_format(value: Any, form: Any) -> str | None:
    """The date in a format; `%D`, which Python has not, is the day with its ending."""
    date = when(value)
    if date is None:
        return None
    ending = "th" if 10 < date.day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
    return date.strftime(str(form).replace("%D", f"{date.day}{ending}").replace("%v", "%V"))


def date_add(value: Any, count: Any, unit: Any) -> str | None:
    """`value` and `count` units later, with a time where there was or is one."""
    date, count, unit = when(value), _whole(count), str(unit).upper().rstrip("S")
    months = _MONTHS.get(unit)
    seconds = _SECONDS.get(unit)
    if date is None or months is seconds is None:
        return None
    try:
        if months:
            year, month = divmod(date.year * 12 + date.month - 1 + count * months, 12)
            date = date.replace(year=year, month=month + 1, day=min(date.day, calendar.monthrange(year, month + 1)[1]))
        else:
            date += datetime.timedelta(seconds=count * seconds)
    except (ValueError, OverflowError):
        return None
    return shown(date, ":" in str(value) or unit in ("SECOND", "MINUTE", "HOUR"))


def timestampdiff(unit: Any, start: Any, stop: Any) -> int | None:
    """Whole units from `start` to `stop`."""
    first, last = when(start), when(stop)
    if first is None or last is None:
        return None
    unit = str(unit).upper().rstrip("S")
    if unit in _MONTHS:
        sign, (low, high) = (1, (first, last)) if first <= last else (-1, (last, first))
        months = (high.year - low.year) * 12 + high.month - low.month
        months -= (high.day, high.time()) < (low.day, low.time())
        return sign * (months // _MONTHS[unit])
    seconds = _SECONDS.get(unit)
    return int((last - first).total_seconds() / seconds) if seconds else None


def datediff(left: Any, right: Any) -> int | None:
    first, last = when(left), when(right)
    return None if first is None or last is None else (first.date() - last.date()).days


def last_day(date: Any) -> str:
    return shown(date.replace(day=calendar.monthrange(date.year, date.month)[1]), with_time=False)


def seconds_since_1970(date: Any) -> int:
    return calendar.timegm(date.timetuple())


def from_unixtime(value: Any) -> str:
    return shown(datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=_whole(value)), with_time=True)


FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "year": (1, of_date(lambda date: date.year)), "month": (1, of_date(lambda date: date.month)),
    "day": (1, of_date(lambda date: date.day)), "quarter": (1, of_date(lambda date: (date.month + 2) // 3)),
    "week": (1, of_date(lambda date: int(date.strftime("%U")))), "weekday": (1, of_date(lambda date: date.weekday())),
    "dayofweek": (1, of_date(lambda date: date.isoweekday() % 7 + 1)),
    "dayofyear": (1, of_date(lambda date: date.timetuple().tm_yday)),
    "dayname": (1, of_date(lambda date: date.strftime("%A"))), "last_day": (1, of_date(last_day)),
    "date_of": (1, of_date(lambda date: shown(date, with_time=False))),
    "datetime_of": (1, of_date(lambda date: shown(date, with_time=True))),
    "time_of": (1, lambda value: None if (parts := clock(value)) is None else "{:02}:{:02}:{:02}".format(*parts)),
    "hour": (1, lambda value: (clock(value) or (None,))[0]), "minute": (1, lambda value: (clock(value) or (None, None))[1]),
    "second": (1, lambda value: (clock(value) or (None,) * 3)[2]),
    "to_days": (1, of_date(lambda date: date.toordinal() + 365)), "unix_timestamp": (1, of_date(seconds_since_1970)),
    "from_unixtime": (1, from_unixtime), "str_to_date": (2, str_to_date), "datediff": (2, datediff),
    "date_format": (2, date_format), "date_add": (3, date_add), "timestampdiff": (3, timestampdiff)}
