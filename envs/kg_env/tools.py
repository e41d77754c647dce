"""What the agent is told: the seven tools and the system prompts."""

from __future__ import annotations

from envs.base import function_tool

_VARIABLE, _TERM = "a variable such as #0", "a variable such as #0, or an entity of the question"
_ATTRIBUTE = "one of the variable's attributes"
TOOLS = [
    function_tool("get_relations", "List the relations that lead from an entity, or from the members of a variable.",
                  variable=_TERM),
    function_tool("get_neighbors", "Make a variable of everything that a relation leads to. Look up the relations first.",
                  variable=_TERM, relation="one of the relations listed for it"),
    function_tool("intersection", "Make a variable of what two variables of the same type have in common.",
                  variable1=_VARIABLE, variable2=_VARIABLE),
    function_tool("get_attributes", "List the numeric attributes of a variable's members.", variable=_VARIABLE),
    function_tool("argmax", "Make a variable of the members with the highest attribute. Look up the attributes first.",
                  variable=_VARIABLE, attribute=_ATTRIBUTE),
    function_tool("argmin", "Make a variable of the members with the lowest attribute. Look up the attributes first.",
                  variable=_VARIABLE, attribute=_ATTRIBUTE),
    function_tool("count", "Make a variable of the number of a variable's members.", variable=_VARIABLE)]

MICRO_PROMPT = "Use tools, then Final Answer: #id."
FULL_PROMPT = """\
You answer questions from a knowledge base. It holds entities, relations between them, and attributes that are numbers or \
dates. You cannot see it; you reach it through the tools alone.

A variable stands for an entity or a set of entities (or a number) that an earlier call produced. Variables are numbered in \
the order in which they are made, from #0; write #k where a tool wants a variable, or the name of an entity of the question.
Before get_neighbors, look up the relations with get_relations; before argmax or argmin, look up the attributes with \
get_attributes. Use only relations and attributes that were listed.
After each new variable, decide whether it is the answer. When it is, write "Final Answer: #k" as plain text, without a tool \
call.
Take one action at a time. You have at most {turns} rounds."""
