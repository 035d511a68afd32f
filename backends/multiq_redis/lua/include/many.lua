-- Makes calls with many arguments. Long lists are divided into pieces that Lua's stack can hold. The lists have pairs or
-- single values.
local PIECE = 4000

local function many(verb, key, list)
    local size = #list
    for first = 1, size, PIECE do
        redis.call(verb, key, unpack(list, first, math.min(first + PIECE - 1, size)))
    end
end

local function many_got(verb, key, list)
    local size = #list
    if size == 0 then return {} end
    if size <= PIECE then return redis.call(verb, key, unpack(list)) end
    local got = {}
    for first = 1, size, PIECE do
        local last = math.min(first + PIECE - 1, size)
        local part = redis.call(verb, key, unpack(list, first, last))
        for i = 1, last - first + 1 do got[first + i - 1] = part[i] end
    end
    return got
end
