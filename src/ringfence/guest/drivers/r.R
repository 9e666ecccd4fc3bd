# The driver of R contexts: reads requests, evaluates code as a notebook does, reports what came of it.
#
# Guards against plots without a screen (each page becomes a picture), sinks left open, and an interrupt where none
# belongs. All of the driver is in an environment on the search path, so that the workspace is the code's. The words spoken with the other side are
# in interpreter.py; both channels are opened close-on-exec ("e"), so that programs which code starts never have them.

attach(local({
    paths <- commandArgs(trailingOnly = TRUE)
    messages <- file(paths[2], "web", raw = TRUE)
    requests <- file(paths[1], "reb", raw = TRUE)
    shown_rows <- 1000L
    data_cells <- 100000L

    say <- function(text, content = NULL) {
        writeBin(c(charToRaw(enc2utf8(paste0(text, "\n"))), content), messages)
        flush(messages)
    }
    part <- function(nonce, name, value) {
        if (!is.raw(value)) value <- charToRaw(paste(enc2utf8(as.character(value)), collapse = "\n"))
        say(sprintf("part %s %s %d", nonce, gsub("[[:space:]]", "_", name), length(value)), value)
    }
    show <- function(nonce, bundle, main) {
        for (name in names(bundle)) part(nonce, name, bundle[[name]])
        say(sprintf("show %s %s", nonce, if (main) "main" else "display"))
    }

    # --- values -----------------------------------------------------------------------------------------------------

    quote_json <- function(text) {
        text <- enc2utf8(as.character(text))
        text <- gsub("\\", "\\\\", text, fixed = TRUE)
        text <- gsub("\"", "\\\"", text, fixed = TRUE)
        for (code in 1:31) {
            character <- rawToChar(as.raw(code))
            if (any(grepl(character, text, fixed = TRUE)))
                text <- gsub(character, sprintf("\\u%04x", code), text, fixed = TRUE)
        }
        paste0("\"", text, "\"")
    }
    json_of <- function(column) { # of an atomic vector: its members
        if (is.factor(column) || !is.atomic(column) || inherits(column, c("Date", "POSIXt"))) column <- format_each(column)
        missing <- is.na(column)
        if (is.logical(column)) members <- ifelse(column, "true", "false")
        else if (is.numeric(column)) {
            members <- format(column, digits = 15, trim = TRUE, scientific = NA)
            for (index in which(!missing)) members[index] <- sprintf("%.15g", as.numeric(column[index]))
            missing <- missing | !is.finite(column)
        } else members <- quote_json(column)
        members[missing] <- "null"
        paste0("[", paste(members, collapse = ","), "]")
    }
    format_each <- function(column) {
        if (is.factor(column)) return(as.character(column))
        if (inherits(column, c("Date", "POSIXt"))) return(ifelse(is.na(column), NA, format(column)))
        vapply(column, function(item) paste(format(item), collapse = " "), "")
    }
    escape_html <- function(text) {
        text <- gsub("&", "&amp;", as.character(text), fixed = TRUE)
        gsub(">", "&gt;", gsub("<", "&lt;", text, fixed = TRUE), fixed = TRUE)
    }
    bundle_of_frame <- function(frame) {
        rows <- nrow(frame)
        shown <- utils::head(frame, shown_rows)
        cells <- lapply(shown, function(column) paste0("<td>", escape_html(format(column)), "</td>"))
        body <- if (nrow(shown) && length(cells))
            paste0("<tr><th>", escape_html(rownames(shown)), "</th>", do.call(paste0, unname(cells)), "</tr>", collapse = "\n")
        head <- paste0("<th>", escape_html(names(shown)), "</th>", collapse = "")
        kept <- utils::head(frame, max(data_cells %/% max(length(frame), 1L), 1L))
        columns <- paste0(quote_json(names(kept)), ":", vapply(kept, json_of, ""), collapse = ",")
        list(
            `text/html` = paste0("<table>\n<thead><tr><th></th>", head, "</tr></thead>\n<tbody>\n", body, "\n</tbody>\n</table>",
                if (rows > nrow(shown)) sprintf("<p>%d rows, %d shown</p>", rows, nrow(shown))),
            `application/vnd.ringfence.data+json` = paste0("{", if (length(kept)) columns, "}")
        )
    }
    printed <- function(value) {
        # Through a connection of our own: a sink of the code's keeps its place.
        text <- character()
        pipe <- textConnection("text", "w", local = TRUE, encoding = "UTF-8")
        sink(pipe)
        depth <- sink.number()
        on.exit({
            while (sink.number() >= depth) sink()
            close(pipe)
        })
        if (isS4(value)) methods::show(value) else print(value)
        while (sink.number() >= depth) sink()
        on.exit()
        close(pipe)
        paste(text, collapse = "\n")
    }
    bundle_of <- function(value) {
        own <- attr(value, "ringfence_bundle", exact = TRUE)
        if (!is.null(own)) return(own)
        c(list(`text/plain` = printed(value)), if (is.data.frame(value)) bundle_of_frame(value))
    }

    # --- plots ------------------------------------------------------------------------------------------------------

    pictures <- NULL
    open_device <- function(...) {
        pictures <<- tempfile("plot-")
        dir.create(pictures)
        grDevices::png(file.path(pictures, "%05d.png"), width = 800, height = 600, res = 110, type = "cairo")
    }
    options(device = open_device)
    take_pictures <- function(nonce) {
        if (is.null(pictures)) return()
        # Only the devices that this driver opened: what code sends to a file of its own is its own.
        for (device in grDevices::dev.list()[names(grDevices::dev.list()) == "png"]) grDevices::dev.off(device)
        for (path in sort(list.files(pictures, full.names = TRUE)))
            show(nonce, list(`image/png` = readBin(path, "raw", file.size(path))), FALSE)
        unlink(pictures, recursive = TRUE)
        pictures <<- NULL
    }

    # --- evaluation -------------------------------------------------------------------------------------------------

    running <- NULL
    display <- function(value, type = NULL) {
        if (is.null(running)) return(invisible())
        show(running, if (is.null(type)) bundle_of(value) else stats::setNames(list(value), type), FALSE)
        invisible()
    }
    calls_text <- function(calls) {
        own <- vapply(calls, function(call) identical(call[[1]], quote(ringfence_cell)), NA)
        if (any(own)) calls <- calls[-seq_len(max(which(own)) + 3L)]
        # What signals and handles conditions is no part of the code's story.
        calls <- Filter(function(call) !is.function(call[[1]]) && !(is.symbol(call[[1]]) && as.character(call[[1]]) %in%
            c(".handleSimpleError", "h", "stop", "withCallingHandlers", "simpleError")), calls)
        calls <- Filter(function(call) !(is.call(call[[1]]) && identical(call[[1]][[1]], quote(`function`))), calls)
        if (!length(calls)) return(character())
        paste0(seq_along(calls), ". ", vapply(calls, function(call) paste(utils::head(deparse(call, nlines = 3L), 3L), collapse = "\n   "), ""))
    }
    report <- function(nonce, name, value, traceback) {
        part(nonce, "name", name)
        part(nonce, "value", value)
        part(nonce, "traceback", traceback)
        say(paste("error", nonce))
    }
    ringfence_cell <- function(expressions, nonce) {
        for (index in seq_along(expressions)) {
            result <- withVisible(eval(expressions[[index]], globalenv()))
            if (!result$visible) next
            if (index < length(expressions)) {
                if (isS4(result$value)) methods::show(result$value) else print(result$value)
            } else {
                take_pictures(nonce)
                show(nonce, bundle_of(result$value), TRUE)
            }
        }
    }
    evaluate <- function(nonce, code) {
        trace <- character()
        running <<- nonce
        status <- tryCatch({
            say(paste("begin", nonce))
            expressions <- tryCatch(parse(text = code, keep.source = TRUE, encoding = "UTF-8"), error = identity)
            if (inherits(expressions, "error")) {
                text <- sub("^<text>:", "line ", conditionMessage(expressions))
                report(nonce, "SyntaxError", strsplit(text, "\n")[[1]][1], text)
                "error"
            } else {
                withCallingHandlers(ringfence_cell(expressions, nonce), error = function(error) trace <<- calls_text(sys.calls()))
                "ok"
            }
        }, interrupt = function(condition) "interrupted", error = function(error) {
            call <- conditionCall(error)
            value <- conditionMessage(error)
            head <- if (is.null(call) || identical(call[[1]], quote(eval))) paste("Error:", value)
                else paste0("Error in ", deparse(call, nlines = 1L)[1], ": ", value)
            report(nonce, class(error)[1], value, c(head, if (length(trace)) c("Traceback:", trace)))
            "error"
        })
        tryCatch(take_pictures(nonce), error = function(error) NULL, interrupt = function(condition) NULL)
        running <<- NULL
        while (sink.number() > 0) sink()
        if (sink.number(type = "message") != 2) sink(type = "message")
        flush(stdout())
        flush(stderr())
        say(paste("done", nonce, status))
    }

    # --- requests ---------------------------------------------------------------------------------------------------

    read_line <- function() {
        bytes <- raw()
        repeat {
            byte <- readBin(requests, "raw", 1L)
            if (!length(byte)) quit("no", 70L)
            if (byte == as.raw(10L)) return(rawToChar(bytes))
            bytes <- c(bytes, byte)
        }
    }
    read_text <- function(size) {
        bytes <- raw()
        while (length(bytes) < size) bytes <- c(bytes, readBin(requests, "raw", size - length(bytes)))
        text <- rawToChar(bytes)
        Encoding(text) <- "UTF-8"
        text
    }
    put <- function(variables) for (name in names(variables)) {
        if (is.na(variables[[name]])) Sys.unsetenv(name) else do.call(Sys.setenv, stats::setNames(list(variables[[name]]), name))
    }
    serve <- function() {
        words <- strsplit(read_line(), " ", fixed = TRUE)[[1]]
        code <- read_text(as.integer(words[3]))
        variables <- list()
        for (index in seq_len(as.integer(words[4]))) {
            sizes <- as.integer(strsplit(read_line(), " ", fixed = TRUE)[[1]])
            name <- read_text(sizes[1])
            variables[[name]] <- if (sizes[2] < 0) NA_character_ else read_text(sizes[2])
        }
        before <- lapply(stats::setNames(nm = names(variables)), Sys.getenv, unset = NA_character_)
        put(variables)
        evaluate(words[2], code)
        put(before)
    }

    list(
        display = display,
        # base's would close the driver's own, too
        closeAllConnections = function() {
            while (sink.number() > 0) sink()
            own <- c(0:2, as.integer(requests), as.integer(messages))
            for (number in setdiff(as.integer(rownames(showConnections(all = TRUE))), own)) close(getConnection(number))
            invisible()
        },
        .ringfence_serve = function() {
            options(warn = 1, menu.graphics = FALSE, width = 100, keep.source = TRUE)
            say("ready")
            repeat tryCatch(serve(), interrupt = function(condition) NULL)
        }
    )
}), name = "ringfence", warn.conflicts = FALSE)

.ringfence_serve()
