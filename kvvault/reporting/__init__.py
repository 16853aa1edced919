"""Reports for auditors: what the catalog says, gathered (`retention`, `disposals`, `encryption`,
`processing`, `subject`) and rendered (`rendering`).

Reports hold tenants' names, and those of policies, actors and reasons, as clear text: they are for
people who may know them. No prompt text, and nothing that opens anything.
"""
