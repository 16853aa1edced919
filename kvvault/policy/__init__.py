"""What is kept, for whom, until when: the policy language. Pure, except for reading files.

`document` reads a policy and refuses what makes no sense, `decide` applies it to one request,
`cases` are its tests, `shipped` finds the policies that come with kvvault. docs/policies.md
explains the language.
"""
